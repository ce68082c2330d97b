"""Settings of a run: defaults and errors."""

from typing import Any

import pytest

import espalier
from espalier.errors import EspalierError
from espalier.methods.pruning.fedprllm import FedPrLLMSettings
from espalier.settings.keys import changed, default_values, keys_in_order
from espalier.settings.node import NodeSettings
from espalier.settings.registry import METHODS, Row
from espalier.settings.run import RunSettings, parse
from espalier.settings.unknown_key import FOREIGN, OF_SITES
from tests.settings.default_settings import DEFAULTS, PYPROJECT, mistake_lines

# ----- defaults -----------------------------------------------------------------------------------


def test_pyprojects_defaults_are_valid() -> None:
    assert parse(DEFAULTS) == parse({})


def test_no_settings_at_all_are_the_defaults() -> None:
    expected = RunSettings()
    assert parse({}) == expected.model_copy(
        update={"federation": expected.federation.for_method(expected.job)}
    )


def test_pyproject_and_package_versions_agree() -> None:
    assert PYPROJECT["project"]["version"] == espalier.__version__


# ----- errors -------------------------------------------------------------------------------------


def test_all_mistakes_have_one_line_each() -> None:
    lines = mistake_lines(
        DEFAULTS
        | {
            "seed": -1,
            "num-clients": "8",
            "data.num-samples": 0,
            "pruning.sparsity": 1.5,
            "dtype": "int8",
            "colour": "red",
        }
    )
    assert sorted(line.split()[0].rstrip(":") for line in lines) == [
        "colour",
        "data.num-samples",
        "dtype",
        "num-clients",
        "pruning.sparsity",
        "seed",
    ]


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("seed", -1, "greater than or equal to 0"),
        ("num-clients", 0, "greater than or equal to 1"),
        ("num-clients", "8", "valid integer"),
        ("num-clients", True, "valid integer"),
        ("num-clients", 8.0, "valid integer"),
        ("quorum", -0.1, "greater than or equal to 0"),
        ("quorum", 1.5, "less than or equal to 1"),
        ("quorum", float("nan"), "finite"),
        ("deadline-seconds", float("inf"), "finite"),
        ("device", "tpu", "'auto', 'cpu' or 'cuda'"),
        ("model", "", "at least 1 character"),
        ("model", 3, "valid string"),
        ("part-bytes", 2**31, "less than or equal to 1073741824"),
        ("data.source", "web", "'auto', 'documentation', 'code', 'files' or 'hub'"),
        ("evaluation.local-baseline", "yes", "write true or false"),
        ("evaluation.own-text", 1, "write true or false"),
        ("evaluation.texts", "wikitext", "neither 'documentation' nor 'code' nor 'name=path'"),
        ("evaluation.texts", "a=x,a=y", "same name"),
        ("pruning.sparsity", 0.0, "greater than 0"),
        ("pruning.sparsity", 1.0, "less than 1"),
        ("pruning.comparison-group", "diagonal", "'layer', 'row' or 'column'"),
    ],
)
def test_mistake_names_key_value_and_range(key: str, value: object, allowed: str) -> None:
    (line,) = mistake_lines(DEFAULTS | {key: value})
    assert line.startswith(f"{key} = {value!r}: ")
    assert allowed in line


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("num-client", "num-clients"),
        ("fedprllm.sparsty", "pruning.sparsity"),
        ("data.sample", "data.num-samples"),
        ("sed", "seed"),
        ("prunning.sparsity", "pruning.sparsity"),
        ("prune.sparsity", "pruning.sparsity"),
        ("fedprllm.pruning-sparsity", "pruning.sparsity"),
        ("num-server-rounds", "federation.rounds"),
        ("client-batch-size", "training.batch-size"),
        ("lr", "training.learning-rate"),
        ("output_dir", "out-dir"),
        ("max_seq_length", "task.max-tokens"),
        ("load_in_4bit", "training.base"),
        ("num_train_epochs", "training.steps"),
        ("gradient_accumulation_steps", "training.accumulation"),
        ("lora_alpha", "lora.alpha"),
        ("client-lr", "training.learning-rate"),
        ("min_available_clients", "quorum"),
    ],
)
def test_a_misspelt_key_is_met_with_the_right_one(wrong: str, meant: str) -> None:
    (line,) = mistake_lines({wrong: 1})
    assert line == f"{wrong}: unknown key; did you mean '{meant}'?"


@pytest.mark.parametrize("method", ["fedprllm", "fedspallm"])
def test_bare_key_suggests_method_s_table(method: str) -> None:
    (line,) = mistake_lines({"method": method, "sparsity": 0.6})
    assert line == "sparsity: unknown key; did you mean 'pruning.sparsity'?"


def test_a_key_of_a_site_is_told() -> None:
    names = {field.alias or name for name, field in NodeSettings.model_fields.items()}
    assert names - default_values().keys() == OF_SITES
    with pytest.raises(EspalierError, match="device-map: unknown key of a run; it is one of a"):
        parse({"device-map": "auto"})
    (line,) = mistake_lines({"num-samples": 1})
    assert line == "num-samples: unknown key; did you mean 'data.num-samples'?"


def test_unrelated_key_lists_the_keys_without_a_table_and_the_tables() -> None:
    (line,) = mistake_lines({"zzzzzz": 1})
    assert line.startswith("zzzzzz: unknown key; known are method, model, seed, ")
    assert len(line) < 600
    for key in DEFAULTS:
        assert f" {key.partition('.')[0]}" in line


@pytest.mark.parametrize(
    "key", ["warmup-steps", "eval_steps", "warmup_ratio", "trust_remote_code", "run-name"]
)
def test_one_word_in_common_is_no_suggestion(key: str) -> None:
    (line,) = mistake_lines({key: 1})
    assert line.startswith(f"{key}: unknown key; known are method, ")


def test_unknown_key_of_a_table_lists_the_keys_of_this_table() -> None:
    (line,) = mistake_lines({"method": "fedpetuning", "training.mixed-precision": 1})
    assert line.startswith("training.mixed-precision: unknown key; known are training.base, ")
    assert "lora.rank" not in line


def test_a_table_with_a_similar_name_is_no_suggestion() -> None:
    (line,) = mistake_lines({"method": "flora", "flora.foo": 1})
    assert line.startswith("flora.foo: unknown key; known are keys of the tables data, ")


def test_names_of_other_programs_are_not_keys_and_what_they_name_is() -> None:
    known = keys_in_order("fedprllm")
    assert not FOREIGN.keys() & set(known)
    assert set(FOREIGN.values()) <= set(known)


def test_one_line_per_unread_key() -> None:
    """The line with the reason is enough, and values are written as in TOML."""
    for given, reason in (
        ({"method": "hetlora", "federation.secure-sum": True}, "needs each client's adapters"),
        ({"method": "flora", "federation.wire-dtype": "nf4"}, "sums updates exactly"),
    ):
        with pytest.raises(EspalierError, match=reason) as caught:
            parse(given, by_hand=[key for key in given if key != "method"])
        _, *lines = str(caught.value).splitlines()
        assert len(lines) == 1
    with pytest.raises(EspalierError, match=r"lora.merge = true: method = 'flap' does not read"):
        parse({"method": "flap", "lora.merge": True}, by_hand=["lora.merge"])


def test_value_by_hand_must_concern_method() -> None:
    config = DEFAULTS | {"pruning.ratio": 0.7, "fedspallm.aggregation": "mean", "lora.ranks": "2"}
    assert parse(config) == parse({})
    with pytest.raises(
        EspalierError, match=r"pruning.ratio = 0.7: method = 'fedprllm' does not read it"
    ) as caught:
        parse(config, by_hand=["pruning.ratio", "fedspallm.aggregation", "seed"])
    assert "fedspallm.aggregation = 'mean': method = 'fedprllm' does not read it" in str(
        caught.value
    )
    assert "hetlora" not in str(caught.value)


def test_what_differs_from_the_defaults() -> None:
    assert changed(DEFAULTS) == set()
    assert changed(
        {"seed": 0, "lora.alpha": 16, "pruning.sparsity": 0.7, "fedspallm.depth": 1}
    ) == {"pruning.sparsity", "fedspallm.depth"}


def test_unknown_method_lists_known_ones() -> None:
    lines = mistake_lines({"method": "fedprlm"})
    meant = f"did you mean 'fedprllm'? choose one of {', '.join(METHODS)}"
    assert lines == [f"method = 'fedprlm': {meant}"]


def test_unchosen_method_s_table_is_not_validated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The additional method has only a row."""
    other = Row("Other", FedPrLLMSettings, strategy="", job="", tunes=True)
    monkeypatch.setitem(METHODS, "other", other)
    assert parse(DEFAULTS | {"other.depth": "very", "lora.depth": "too"}) == parse({})


def test_the_chosen_methods_table_is_validated() -> None:
    (line,) = mistake_lines({"method": "fedprllm", "fedprllm.ties": "coin"})
    assert line.startswith("fedprllm.ties = 'coin': ")


def test_a_whole_number_will_do_for_a_fraction() -> None:
    assert parse({"quorum": 1, "deadline-seconds": 60}).deadline_seconds == 60.0


def test_files_need_a_path() -> None:
    (line,) = mistake_lines({"data.source": "files"})
    assert line.startswith("data.path = ''")


def test_a_path_alone_means_files() -> None:
    assert parse({"method": "fedprllm", "data.path": "notes.csv"}).data.origin == "files"
    assert parse({"method": "fedprllm"}).data.origin == "documentation"


@pytest.mark.parametrize("source", ["documentation", "code"])
def test_built_in_text_has_no_other_partition(source: str) -> None:
    (line,) = mistake_lines({"data.source": source, "data.partition": "quantity"})
    assert (
        line
        == f"data.partition = 'quantity': '{source}' has one source per client; set data.source"
    )


def test_deployed_sites_may_bring_their_data() -> None:
    assert parse({"data.source": "files"}).data.path == ""
    assert parse({"method": "fedpetuning", "task.name": "sst2"}).data.origin == "documentation"
    assert (
        parse({"method": "fedpetuning", "task.name": "sst2", "data.source": "code"}).task.name
        == "sst2"
    )
    (line,) = mistake_lines({"method": "fedpetuning", "task.name": "sst2"})
    assert line == (
        "task.name = 'sst2': needs data.path or data.source = 'hub',"
        " not data.source = 'documentation'"
    )


@pytest.mark.parametrize("source", ["documentation", "code"])
def test_path_without_file_source_is_refused(source: str) -> None:
    (line,) = mistake_lines({"data.source": source, "data.path": "notes.txt"})
    assert "notes.txt" in line
    assert "data.source" in line


def test_combinations_and_values_are_both_told() -> None:
    assert len(mistake_lines({"data.source": "files", "seed": -1})) == 2


def test_a_method_that_is_no_text_is_one_mistake() -> None:
    assert len(mistake_lines({"method": 3})) == 1


@pytest.mark.parametrize(
    "config",
    [
        {"data": 3},
        pytest.param({"data": 3, "data.num-samples": 4}),
        pytest.param({"method": ["fedprllm"]}),
    ],
)
def test_nonsense_ends_in_a_mistake(config: dict[str, Any]) -> None:
    with pytest.raises(EspalierError):
        parse(config)
