"""Effect of the settings of a run: the digest, the data, and the defaults of methods."""

from pathlib import Path
from typing import Any

import pytest

from espalier.errors import EspalierError
from espalier.methods.pruning.fedprllm import FedPrLLMSettings
from espalier.methods.tuning.adapters.settings import AdapterAveraging
from espalier.methods.tuning.hetlora import HetLoRASettings
from espalier.settings.keys import changed
from espalier.settings.registry import METHODS, all_tables, settings_of, tables_of
from espalier.settings.run import NOT_PART_OF_THE_RESULT, RunSettings, parse
from espalier.settings.shared_keys import TABLES, all_shared_keys, shared_keys
from tests.settings.default_settings import DEFAULTS, flat, mistake_lines
from tests.toy_method.contract import METHOD as TOY


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
    settings = parse({"pruning.sparsity": 0.25})
    assert settings.of(FedPrLLMSettings) is settings.job
    assert settings.of(FedPrLLMSettings).sparsity == 0.25
    with pytest.raises(TypeError, match="method fedprllm has no HetLoRASettings"):
        settings.of(HetLoRASettings)


def test_nested_values_have_hyphenated_keys() -> None:
    for method in METHODS:
        others = tuple(f"{name}." for name in all_tables() - set(tables_of(method)))
        job = settings_of(method)
        unread = {
            f"{table}.{key}"
            for key, table in all_shared_keys().items()
            if table in TABLES and key not in shared_keys(job)
        }
        expected = {
            key: value
            for key, value in DEFAULTS.items()
            if not key.startswith(others) and key not in unread
        }
        if "pruning.selection" in expected:
            expected["pruning.selection"] = "block" if method == "llm-pruner" else "global"
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
    "seed": 1, "num-clients": 3, "quorum": 0.25, "threads": 1, "device": "cpu", "dtype": "bfloat16",
    "model": "/m", "out-dir": "elsewhere", "resume-from": "runs/x", "part-bytes": 4096,
    "enrol-seconds": 1.0, "deadline-seconds": 1.0, "attempts": 7, "data.num-samples": 9,
    "data.sequence-length": 9, "evaluation.max-samples": 1, "evaluation.sequence-length": 9,
    "evaluation.local-baseline": False, "evaluation.centralized": "off", "data.field": "body",
    "evaluation.texts": "a=b", "pruning.sparsity": 0.25, "pruning.metric": "magnitude",
    "fedprllm.ties": "index", "activations": "disk", "pruning.comparison-group": "layer",
    "fedprllm.vote-group": "row",
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
    [{}, {"pruning.strategy": "iterative"}, {"fedprllm.weight-scaling": True}],
    ids=["neither", "iterative", "scaled"],
)
def test_scaled_continuation_needs_scaled_blocks(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(
        EspalierError,
        match=(
            r"continue-behind = 'scaled': needs pruning\.strategy = 'iterative'"
            r" and weight-scaling"
        ),
    ):
        parse({"fedprllm.continue-behind": "scaled", **changes})
    both = {"pruning.strategy": "iterative", "fedprllm.weight-scaling": True}
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
    assert run.of(AdapterAveraging).pushes_differences(run.federation) == (sends and not svd)


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
        assert line == (
            f"federation.client-weights = 'norms': {method} does not have these weights; set it to"
            f" 'auto' or {known}"
        )


def test_unread_federation_keys_are_refused() -> None:
    with pytest.raises(
        EspalierError,
        match=r"federation.wire-dtype = 'nf4': method = 'fedspallm' does not read it; leave it out",
    ) as told:
        parse(
            {"method": "fedspallm", "federation.wire-dtype": "nf4"},
            by_hand=["federation.wire-dtype"],
        )
    words = "choose method = 'fed-sb' or 'fedpetuning' or 'fedsoda' or 'fedspine' or 'hetlora'"
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
    monkeypatch.setitem(METHODS, "toy", TOY)
    require_read_again("toy")
    federation = parse({"method": "toy"}).federation
    assert (federation.rounds, federation.client_weights) == (2, "auto")


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
        match=r"'auto' does not read it; .* choose federation.client-weights = 'samples'$",
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
        ("fedprllm.sparsty", False, "pruning.sparsity"),
    ],
)
def test_key_of_another_table_is_suggested(key: str, by_hand: bool, meant: str) -> None:
    method = key.partition(".")[0] if not by_hand else "fedprllm"
    with pytest.raises(EspalierError, match=f"{key}: unknown key; did you mean '{meant}'"):
        parse({"method": method, key: 1}, by_hand=[key] if by_hand else [])
