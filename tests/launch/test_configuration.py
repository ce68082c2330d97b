"""Settings of ``espalier run``: presets, and words by hand."""

from pathlib import Path

import pytest

from espalier.cli.command import main
from espalier.errors import EspalierError
from espalier.launch.app import default_config
from espalier.launch.configuration import configuration, flatten
from espalier.launch.presets import preset_files, read_preset
from espalier.methods.pruning.fedprllm import FedPrLLMSettings
from espalier.methods.pruning.fedspallm import FedSpaLLMSettings
from espalier.settings.keys import changed
from espalier.settings.run import parse

APP = Path(__file__).parent.parent.parent
PRESETS = list(preset_files(APP))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_read_completely(name: str) -> None:
    """Every value of a preset reaches the run's settings."""
    config, settings = configuration(APP, [name], on_this_machine=False)
    given = flatten(read_preset(APP, name))
    assert given.items() <= config.items()
    assert given.items() <= flatten(settings.nested()).items()
    configuration(APP, [name], on_this_machine=True)


def test_a_key_with_two_values_is_refused() -> None:
    with pytest.raises(EspalierError, match="num-clients: is given as 3 and as 4; leave one out"):
        configuration(APP, ["num-clients=3", "num-clients=4"], on_this_machine=False)


def test_a_value_that_is_no_number_is_told_as_such() -> None:
    with pytest.raises(EspalierError, match=r"privacy\.epsilon = nan"):
        configuration(APP, ["fedpetuning", "privacy.epsilon=nan"], on_this_machine=False)
    with pytest.raises(EspalierError, match="is given as nan and as 1; leave one out"):
        configuration(APP, ["privacy.epsilon=nan", "privacy.epsilon=1"], on_this_machine=False)


def test_words_win_over_the_preset_and_values_are_typed() -> None:
    given = [
        "num-clients=5",
        "pruning.sparsity=0.7",
        "evaluation.local-baseline=false",
        "data.field=body",
    ]
    words = ["two-sites", *given, "data.source=files", "data.path=notes.jsonl"]
    config, settings = configuration(APP, words, on_this_machine=True)
    assert (settings.num_clients, settings.of(FedPrLLMSettings).sparsity) == (5, 0.7)
    assert settings.evaluation.local_baseline is False
    assert config["data.field"] == "body"
    assert settings.evaluation.centralized == "off"


def test_paths_are_relative_to_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    words = [
        "fedpetuning",
        "model=m",
        "evaluation.texts=documentation,w=a/w.txt",
        "data.source=files",
        "data.path=t{client}.txt",
        "task.name=gsm8k",
        "task.test-path=q.jsonl",
    ]
    config, _ = configuration(APP, words, on_this_machine=True)
    assert config["model"] == str(tmp_path / "m")
    assert config["evaluation.texts"] == f"documentation,w={tmp_path}/a/w.txt"
    assert config["data.path"] == f"{tmp_path}/t{{client}}.txt"
    assert config["task.test-path"] == str(tmp_path / "q.jsonl")
    assert config["out-dir"] == str(tmp_path / "runs")
    assert config["resume-from"] == ""
    assert configuration(APP, [], on_this_machine=True)[0]["task.test-path"] == ""
    elsewhere, _ = configuration(APP, words, on_this_machine=False)
    assert (elsewhere["model"], elsewhere["out-dir"]) == ("m", "runs")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["fedprllm", "fedspallm.aggregation=mean"],
            (
                "fedspallm.aggregation = 'mean': method = 'fedprllm' does not read it; leave it"
                " out, or choose method = 'fedspallm'"
            ),
        ),
        # A value that equals the default is refused too if it is given.
        (["fedprllm", "fedspallm.aggregation=l0"], "fedspallm.aggregation = 'l0': "),
        # A shared key is refused where another method alone reads it.
        (
            ["fedprllm", "pruning.ratio=0.2"],
            "pruning.ratio = 0.2: method = 'fedprllm' does not read it; leave it out, or choose",
        ),
        (
            ["fedspallm", "lora.rank=4"],
            (
                "lora.rank = 4: method = 'fedspallm' does not read it; leave it out, or choose"
                " method = 'fed-sb' or 'fedpetuning' or 'fedsoda' or 'fedspine' or"
                " 'flora' or 'hetlora'"
            ),
        ),
        (
            ["hetlora", "fedpetuning.aggregation=svd"],
            (
                "fedpetuning.aggregation = 'svd': method = 'hetlora' does not read it; set"
                " hetlora.aggregation, or choose"
            ),
        ),
        (
            ["fedprllm", "method=fedspallm", "fedprllm.ties=index"],
            "fedprllm.ties = 'index': method = 'fedspallm' does not",
        ),
    ],
)
def test_setting_of_another_method_is_refused(words: list[str], line: str) -> None:
    with pytest.raises(EspalierError) as caught:
        configuration(APP, [*words, "seed=-1"], on_this_machine=True)
    _, *told = str(caught.value).splitlines()
    assert told[0].strip().startswith(line)
    assert told[1].strip().startswith("seed = -1")


@pytest.mark.parametrize(
    ("words", "key", "reason", "remedy"),
    [
        (
            "fedpetuning data.num-samples=4",
            "data.num-samples = 4",
            "method = 'fedpetuning'",
            "method = 'fedprllm' or 'fedspallm'",
        ),
        # A value that equals the default is refused too if it is given.
        ("hetlora data.num-samples=8", "data.num-samples = 8", "method = 'hetlora'", "method = "),
        (
            "hetlora task.max-tokens=96",
            "task.max-tokens = 96",
            "task.name = 'text'",
            "another task",
        ),
        (
            "fedpetuning BOOLQ data.sequence-length=64",
            "data.sequence-length = 64",
            "task.name = 'boolq'",
            "task.name = 'text'",
        ),
        (
            "fedpetuning BOOLQ task.answer-tokens=64",
            "task.answer-tokens = 64",
            "task.name = 'boolq'",
            "task.name = 'gsm8k'",
        ),
        (
            "pruning.pattern=2:4 pruning.sparsity=0.6",
            "pruning.sparsity = 0.6",
            "pruning.pattern = '2:4'",
            "pruning.pattern = ''",
        ),
        (
            "fedspallm fedspallm.local-method=wanda fedspallm.damping-mean=all",
            "fedspallm.damping-mean = 'all'",
            "fedspallm.local-method = 'wanda'",
            "fedspallm.local-method = 'sparsegpt'",
        ),
        (
            "data.hub-split=train",
            "data.hub-split = 'train'",
            "data.source = 'auto'",
            "data.source = 'files' or 'hub'",
        ),
        (
            "TEXT data.alpha=0.1",
            "data.alpha = 0.1",
            "data.partition = 'iid'",
            "data.partition = 'dirichlet' or 'quantity'",
        ),
        (
            "data.source=files data.path={client}.txt data.partition=quantity",
            "data.partition = 'quantity'",
            "data.path = '{client}.txt'",
            "a data.path without {client}",
        ),
    ],
)
def test_unread_setting_is_refused(words: str, key: str, reason: str, remedy: str) -> None:
    given = words.replace("BOOLQ", "task.name=boolq data.source=hub").replace(
        "TEXT", "data.source=files data.path=a.txt"
    )
    with pytest.raises(EspalierError) as caught:
        configuration(APP, given.split(), on_this_machine=True)
    _, told = str(caught.value).splitlines()
    assert told.strip().startswith(
        f"{key}: {reason} does not read it; leave it out, or choose {remedy}"
    )


def test_preset_value_yields_to_choice_by_hand(
    tmp_path: Path,
) -> None:
    """The preset's 128 tokens per sample are for text.

    The ServerApp does not see the arguments and gets the default.
    """
    config, settings = configuration(
        APP, ["fedpetuning", "task.name=boolq", "data.source=hub"], on_this_machine=True
    )
    assert (settings.task.name, config["data.sequence-length"]) == ("boolq", 256)
    assert parse(config, simulation=True, by_hand=changed(config)).task.name == "boolq"
    preset = tmp_path / "mine.toml"
    preset.write_text('method = "fedpetuning"\n[data]\nnum-samples = 4\nsequence-length = 64\n')
    with pytest.raises(
        EspalierError, match=r"data.num-samples = 4: method = 'fedpetuning' does not read it"
    ):
        configuration(APP, [str(preset)], on_this_machine=True)
    assert (
        configuration(APP, [str(preset), "method=fedprllm"], on_this_machine=True)[
            1
        ].data.num_samples
        == 4
    )


@pytest.mark.parametrize("name", PRESETS)
def test_the_server_takes_what_a_preset_says(name: str) -> None:
    config, _ = configuration(APP, [name], on_this_machine=False)
    assert parse(config, by_hand=changed(config)).nested() == parse(config).nested()


def test_own_preset_with_unread_table_is_refused(tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text(
        'method = "fedprllm"\n[fedspallm]\nsampled-layers = 0.7\ncoverage = "every-round"\n'
    )
    with pytest.raises(
        EspalierError, match=r"fedspallm.sampled-layers = 0.7: method = 'fedprllm' does not read it"
    ) as caught:
        configuration(APP, [str(preset)], on_this_machine=True)
    # This is the default value: a complete preset may contain all tables.
    assert "coverage" not in str(caught.value)
    _, settings = configuration(APP, [str(preset), "method=fedspallm"], on_this_machine=True)
    assert settings.of(FedSpaLLMSettings).sampled_layers == 0.7


def test_other_method_drops_preset_s_table() -> None:
    config, settings = configuration(
        APP, ["fedprllm-paper", "method=fedspallm", "num-clients=2"], on_this_machine=False
    )
    assert settings.method == "fedspallm"
    assert {key: config[key] for key in config if key.startswith("fedprllm.")} == {
        f"fedprllm.{key}": value for key, value in default_config(APP)["fedprllm"].items()
    }


def test_simulated_clients_need_a_data_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "data.source=files", "--app", str(APP)]) == 2
    assert (
        "data.path = '': data.source = 'files' needs the path of a file" in capsys.readouterr().err
    )
    # Real sites have their own paths.
    _, settings = configuration(APP, ["data.source=files"], on_this_machine=False)
    assert settings.data.source == "files"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("lora.ranks=8", "8"),
        ("lora.layers=1", "1"),
        ("lora.ranks='8'", "8"),
        ("resume-from=2024-05-01", "2024-05-01"),
    ],
)
def test_what_is_a_string_by_default_stays_one(word: str, value: str) -> None:
    config, _ = configuration(APP, ["hetlora", "lora.ranks=8", word], on_this_machine=False)
    assert config[word.partition("=")[0]] == value


def test_all_mistakes_are_told_with_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["run", "seed=-1", "fedprllm.sparsty=0.3", "data.num-samples=many", "--app", str(APP)])
        == 2
    )
    told = capsys.readouterr().err
    assert "seed = -1" in told
    assert "did you mean 'pruning.sparsity'?" in told
    assert "data.num-samples = 'many'" in told


def test_words_may_follow_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "two-sites", "--app", str(APP), "seed=-1"]) == 2
    assert "seed = -1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "--nods", "3", "--app", str(APP)])


def test_a_preset_that_cannot_be_read_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "directory.toml").mkdir()
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for name, words in (
        (str(tmp_path / "directory.toml"), "cannot be read (Is a directory)"),
        (str(tmp_path / "binary.toml"), "is not TOML"),
        ("x" * 300 + ".toml", "cannot be read (File name too long)"),
    ):
        assert main(["run", name, "--app", str(APP)]) == 2
        assert words in capsys.readouterr().err


def test_a_path_by_hand_replaces_the_text_of_a_preset() -> None:
    """The preset names Python's source code."""
    assert configuration(APP, ["fedpetuning"], on_this_machine=False)[1].data.origin == "code"
    words = ["fedpetuning", "data.path=notes.csv"]
    assert configuration(APP, words, on_this_machine=False)[1].data.origin == "files"
