"""Settings of a run: defaults, errors, tables of other methods and the digest."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

import espalier
from espalier.errors import EspalierError
from espalier.methods.pruning.fedprllm import FedPrLLMSettings
from espalier.methods.tuning.adapters.settings import AdapterAveraging
from espalier.methods.tuning.hetlora import HetLoRASettings
from espalier.settings.keys import changed
from espalier.settings.methods import METHODS, Row, all_tables, settings_of, tables_of
from espalier.settings.run import NOT_PART_OF_THE_RESULT, RunSettings, parse
from tests.toy_method import ROW

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted keys, as Flower passes them."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        )
    return values


DEFAULTS = flat(PYPROJECT["tool"]["flwr"]["app"]["config"])


def mistake_lines(config: dict[str, Any]) -> list[str]:
    with pytest.raises(EspalierError) as caught:
        parse(config, simulation=True)
    heading, *lines = str(caught.value).splitlines()
    assert heading == "the run's settings are wrong:"
    return [line.strip() for line in lines]


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
            "fedprllm.sparsity": 1.5,
            "dtype": "int8",
            "colour": "red",
        }
    )
    assert sorted(line.split()[0].rstrip(":") for line in lines) == [
        "colour",
        "data.num-samples",
        "dtype",
        "fedprllm.sparsity",
        "num-clients",
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
        ("fedprllm.sparsity", 0.0, "greater than 0"),
        ("fedprllm.sparsity", 1.0, "less than 1"),
        ("fedprllm.local-comparison-group", "diagonal", "'layer', 'row' or 'column'"),
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
        ("fedprllm.sparsty", "fedprllm.sparsity"),
        ("data.sample", "data.num-samples"),
        ("sed", "seed"),
    ],
)
def test_a_misspelt_key_is_met_with_the_right_one(wrong: str, meant: str) -> None:
    (line,) = mistake_lines({wrong: 1})
    assert line == f"{wrong}: unknown key; did you mean '{meant}'?"


@pytest.mark.parametrize("method", ["fedprllm", "fedspallm"])
def test_bare_key_suggests_method_s_table(method: str) -> None:
    (line,) = mistake_lines({"method": method, "sparsity": 0.6})
    assert line == f"sparsity: unknown key; did you mean '{method}.sparsity'?"


def test_unrelated_key_lists_all_keys() -> None:
    (line,) = mistake_lines({"zzzzzz": 1})
    assert line.startswith("zzzzzz: unknown key; known are ")
    for key in DEFAULTS:
        assert key in line


def test_value_by_hand_must_concern_method() -> None:
    config = DEFAULTS | {"fedspallm.sparsity": 0.7, "hetlora.ranks": "2"}
    assert parse(config) == parse({})
    with pytest.raises(
        EspalierError, match=r"fedspallm.sparsity = 0.7: method = 'fedprllm' does not read it"
    ) as caught:
        parse(config, by_hand=["fedspallm.sparsity", "seed"])
    assert "hetlora" not in str(caught.value)


def test_what_differs_from_the_defaults() -> None:
    assert changed(DEFAULTS) == set()
    assert changed(
        {"seed": 0, "lora.alpha": 16, "fedspallm.sparsity": 0.7, "fedspallm.depth": 1}
    ) == {"fedspallm.sparsity", "fedspallm.depth"}


def test_unknown_method_lists_known_ones() -> None:
    lines = mistake_lines({"method": "fedprlm"})
    assert lines == [f"method = 'fedprlm': choose one of {', '.join(sorted(METHODS))}"]


def test_unchosen_method_s_table_is_not_validated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The additional method has only a row in the table of methods."""
    settings = "espalier.methods.pruning.fedprllm:FedPrLLMSettings"
    other = Row("Other", settings, strategy="", job="", tunes=True)
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
    assert (
        line
        == "task.name = 'sst2': needs data.path or data.source = 'hub', not data.source = 'documentation'"
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


# ----- effect of the settings ---------------------------------------------------------------------


def test_texts_are_named() -> None:
    given = "documentation, code, wiki=/data/wiki.txt ,c4=/data/a=b.txt"
    texts = parse({"evaluation.texts": given}).evaluation.named_texts()
    assert texts == {
        "documentation": "",
        "code": "",
        "wiki": "/data/wiki.txt",
        "c4": "/data/a=b.txt",
    }


def test_the_job_is_the_chosen_methods_table() -> None:
    settings = parse({"fedprllm.sparsity": 0.25})
    assert settings.of(FedPrLLMSettings) is settings.job
    assert settings.of(FedPrLLMSettings).sparsity == 0.25
    with pytest.raises(TypeError, match="method fedprllm has no HetLoRASettings"):
        settings.of(HetLoRASettings)


def test_nested_values_have_hyphenated_keys() -> None:
    for method in METHODS:
        others = tuple(f"{name}." for name in all_tables() - set(tables_of(method)))
        expected = {key: value for key, value in DEFAULTS.items() if not key.startswith(others)}
        job = settings_of(method)
        stands_for = {
            "rounds": job.ROUNDS,
            "client-weights": job.WEIGHTS[0],
            "aggregation-rule": job.RULES[0],
        }
        expected |= {
            f"federation.{key}": value for key, value in stands_for.items() if key in job.FEDERATION
        }
        assert flat(parse({"method": method}).nested()) == expected | {"method": method}


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunSettings().seed = 3  # type: ignore[misc]


OTHER_VALUES = {
    "seed": 1, "num-clients": 3, "quorum": 0.25, "threads": 1, "device": "cpu", "dtype": "bfloat16", "model": "/m",
    "out-dir": "elsewhere", "resume-from": "runs/x", "part-bytes": 4096, "enrol-seconds": 1.0, "deadline-seconds": 1.0,
    "attempts": 7, "data.num-samples": 9, "data.sequence-length": 9, "evaluation.max-samples": 1,
    "evaluation.sequence-length": 9, "evaluation.local-baseline": False, "evaluation.centralized": "off", "data.field": "body",
    "evaluation.texts": "a=b", "fedprllm.sparsity": 0.25, "fedprllm.local-metric": "magnitude", "fedprllm.ties": "index",
    "activations": "disk", "fedprllm.local-comparison-group": "layer", "fedprllm.comparison-group": "row",
}  # fmt: skip


@pytest.mark.parametrize("key", sorted(OTHER_VALUES))
def test_digest_covers_what_the_result_depends_on(key: str) -> None:
    changed = parse({key: OTHER_VALUES[key]}).digest() != parse({}).digest()
    assert changed == (key not in NOT_PART_OF_THE_RESULT)


def test_resumption_may_name_default_quorum() -> None:
    assert (
        parse({}).with_quorum(simulation=True).digest()
        == parse({}).digest()
        == parse({"quorum": 1.0}).digest()
    )


def test_digest_ignores_written_out_defaults() -> None:
    assert parse(DEFAULTS).digest() == parse({}).digest()


def test_a_partition_by_label_needs_labels() -> None:
    (line,) = mistake_lines(
        {"data.source": "files", "data.path": "notes.txt", "data.partition": "dirichlet"}
    )
    assert "needs data.path or data.source = 'hub', and data.partition-field" in line
    assert "one source per client" in mistake_lines({"data.partition": "quantity"})[0]


def test_test_items_are_not_trained_on() -> None:
    config = {
        "method": "fedpetuning",
        "task.name": "sst2",
        "data.source": "files",
        "data.path": "a",
        "task.test-path": "a",
    }
    assert mistake_lines(config) == [
        "task.test-path = 'a': clients train on these items (data.path); name a file of others"
    ]


ITEMS: dict[str, Any] = {
    "method": "fedpetuning",
    "task.name": "sst2",
    "data.source": "files",
    "num-clients": 3,
}


@pytest.mark.parametrize(
    ("path", "test_path"),
    [
        ("a", "./a"),
        ("x/../a", "a"),
        ("~/a", "~/b/../a"),
        ("a", str(Path("a").absolute())),
        ("part-{client}", "part-0"),
        ("part-{client}", "./part-2"),
        ("{client}/1{client}.{jsonl", "2/12.{jsonl"),
    ],
)
def test_test_items_are_found_by_another_path(path: str, test_path: str) -> None:
    (line,) = mistake_lines(ITEMS | {"data.path": path, "task.test-path": test_path})
    assert line.startswith(f"task.test-path = '{test_path}': clients train on these items")


@pytest.mark.parametrize(
    ("path", "test_path"),
    [
        ("a", "b"),
        ("~/a", "a"),
        ("part-{client}", "part-3"),
        ("part-{client}", "part-02"),
        ("part-{client}", "part-"),
        ("{client}/{client}", "1/2"),
        ("{client}.json", "1xjson"),
        ("~nobody\0/a", "~nobody\0/b"),
    ],
)
def test_they_are_others_in_another_file(path: str, test_path: str) -> None:
    assert (
        parse(ITEMS | {"data.path": path, "task.test-path": test_path}).task.test_path == test_path
    )


@pytest.mark.parametrize(
    "wrong",
    [{"data.path": ["a"]}, {"task.test-path": 3}, {"num-clients": "3"}, {"task.test-path": None}],
)
def test_wrong_type_is_told_as_such(wrong: dict[str, Any]) -> None:
    (line,) = mistake_lines(ITEMS | {"data.path": "{client}", "task.test-path": "1"} | wrong)
    assert line.startswith(next(iter(wrong)))


@pytest.mark.parametrize(
    ("given", "simulation", "quorum"),
    [
        ({}, True, 0.5),
        ({}, False, 1.0),
        ({"quorum": 0.25}, True, 0.25),
        ({"quorum": 0.25}, False, 0.25),
    ],
)
def test_default_quorum_is_half_or_all_sites(
    given: dict[str, float], simulation: bool, quorum: float
) -> None:
    assert parse(given).with_quorum(simulation=simulation).quorum == quorum


@pytest.mark.parametrize(
    "changes",
    [{}, {"fedprllm.strategy": "iterative"}, {"fedprllm.weight-scaling": True}],
    ids=["neither", "iterative", "scaled"],
)
def test_scaled_continuation_needs_scaled_blocks(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(
        EspalierError,
        match="continue-behind = 'scaled': needs strategy = 'iterative' and weight-scaling = true",
    ):
        parse({"fedprllm.continue-behind": "scaled", **changes})
    both = {"fedprllm.strategy": "iterative", "fedprllm.weight-scaling": True}
    assert (
        parse({"fedprllm.continue-behind": "scaled", **both}).of(FedPrLLMSettings).continue_behind
        == "scaled"
    )


@pytest.mark.parametrize("method", ["fedpetuning", "hetlora"])
@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16", "nf4"])
@pytest.mark.parametrize("svd", [False, True])
def test_rounded_dtypes_send_differences(method: str, wire_dtype: str, svd: bool) -> None:
    """Adapters of a rounded wire dtype travel as differences.

    The server sends differences from the initial adapters, unless the aggregation is SVD: the SVD
    keeps nothing of the initial adapters, so the server then sends values.
    """
    changes = {"method": method, "federation.wire-dtype": wire_dtype}
    run = parse(changes | ({f"{method}.aggregation": "svd"} if svd else {}))
    sends = run.federation.sends_differences
    assert sends == (wire_dtype != "float32")
    assert run.of(AdapterAveraging).delivers_differences(run.federation) == (sends and not svd)


@pytest.mark.parametrize(
    ("method", "rounds", "weights"),
    [("fedpetuning", 3, "samples"), ("hetlora", 3, "norms"), ("fedspallm", 1, "equal")],
)
def test_method_has_own_weights_and_rounds(method: str, rounds: int, weights: str) -> None:
    federation = parse({"method": method}).federation
    assert (federation.rounds, federation.client_weights) == (rounds, weights)
    given = parse(
        {"method": method, "federation.rounds": 7, "federation.client-weights": "equal"}
    ).federation
    assert (given.rounds, given.client_weights) == (7, "equal")


def test_weights_unknown_to_method_are_refused() -> None:
    for method, known in (
        ("fedpetuning", "'samples' or 'equal'"),
        ("fedspallm", "'equal' or 'samples'"),
    ):
        (line,) = mistake_lines({"method": method, "federation.client-weights": "norms"})
        assert line == f"federation.client-weights = 'norms': {method} knows 'paper' or {known}"


def test_unread_federation_keys_are_refused() -> None:
    with pytest.raises(
        EspalierError,
        match=r"federation.wire-dtype = 'nf4': method = 'fedspallm' does not read it; leave it out",
    ) as told:
        parse(
            {"method": "fedspallm", "federation.wire-dtype": "nf4"},
            by_hand=["federation.wire-dtype"],
        )
    words = "choose method = 'fedpetuning' or 'fed-sb' or 'fedsoda' or 'fedspine' or 'hetlora'"
    assert words in str(told.value)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_written_settings_are_read_again(method: str) -> None:
    """``settings.toml`` has the effective values.

    Every value that differs from the default counts as given by hand.
    """
    require_read_again(method)


def test_written_round_settings_are_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Client weights that the method does not read stay as they are."""
    monkeypatch.setitem(METHODS, "toy", ROW)
    require_read_again("toy")
    federation = parse({"method": "toy"}).federation
    assert (federation.rounds, federation.client_weights) == (2, "paper")


def require_read_again(method: str) -> None:
    settings = parse({"method": method, "seed": 3})
    written = flat(settings.nested())
    assert parse(written, by_hand=changed(written)) == settings


@pytest.mark.parametrize("method", ["fedprllm", "flap", "llm-pruner", "slicegpt"])
def test_method_ignoring_rounds_has_its_own(method: str) -> None:
    """A preset for several methods may set another number."""
    settings = parse({"method": method, "federation.rounds": 7})
    assert settings.job.num_rounds(settings.federation) == 1


def test_weight_bound_needs_unequal_weights() -> None:
    with pytest.raises(
        EspalierError,
        match=r"'paper' does not read it; .* choose federation.client-weights = 'samples'$",
    ):
        parse(
            {"method": "fedspallm", "federation.max-weight-ratio": 3.0},
            by_hand=["federation.max-weight-ratio"],
        )
    assert parse(
        {"method": "hetlora", "federation.max-weight-ratio": 3.0},
        by_hand=["federation.max-weight-ratio"],
    ).tunes


@pytest.mark.parametrize(
    ("key", "by_hand", "meant"),
    [
        # A key of the method that is in another table.
        ("hetlora.wire-dtype", False, "federation.wire-dtype"),
        # A key that no table of the method has.
        ("fedspallm.rounds", True, "federation.rounds"),
        ("fedprllm.sparsty", False, "fedprllm.sparsity"),
    ],
)
def test_key_of_another_table_is_suggested(key: str, by_hand: bool, meant: str) -> None:
    method = key.partition(".")[0] if not by_hand else "fedprllm"
    with pytest.raises(EspalierError, match=f"{key}: unknown key; did you mean '{meant}'"):
        parse({"method": method, key: 1}, by_hand=[key] if by_hand else [])
