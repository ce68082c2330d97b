"""Tables that ``python -m espalier.training.costs.ledger`` prints."""

import json
from pathlib import Path

import pytest

from espalier.training.costs.ledger import main

Rows = list[dict[str, str]]


def tables(text: str) -> list[Rows]:
    """Return the Markdown tables of a text; a row maps columns to cells."""
    found = []
    for table in text.strip().split("\n\n"):
        columns, _, *rows = (
            [cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()
        )
        found.append([dict(zip(columns, row, strict=True)) for row in rows])
    return found


def test_one_model_on_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "llama-7b", "--num-clients", "4", "--tokens", "0"]) == 0
    trained, wire, memory = tables(capsys.readouterr().out)
    assert trained == [
        {
            "model": "llama-7b",
            "frozen parameters": "6,738,415,616",
            "adapted matrices": "64 of 224",
            "ranks": "8",
            "trained parameters": "4,194,304",
            "share": "0.0622%",
        }
    ]
    assert [row["payload"] for row in wire] == ["float32", "bfloat16", "nf4"]
    for row, per_number in zip(wire, (4, 2, 0.5625), strict=True):
        up = int(row["bytes up, each round"].replace(",", ""))
        assert 0 < up - per_number * 4_194_304 < 32 * 1024, "a header per block"
        assert (row["down, round 1"], row["down, each later round"]) == ("0", f"{up:,}")
        assert row["4 clients up, MiB"] == f"{4 * up / 2**20:.3f}"
    linears = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    rest = 2 * 32000 * 4096 + 65 * 4096
    scales = linears // 64
    sizes = {
        "float32": 4 * (linears + rest),
        "bfloat16": 2 * (linears + rest),
        "nf4, double quantisation, bfloat16": (
            linears / 2 + scales + 4 * (scales / 256 + 224 + 272) + 2 * rest
        ),
        "nf4, bfloat16": linears / 2 + 4 * (scales + 16) + 2 * rest,
    }
    assert [row["base"] for row in memory] == list(sizes)
    for row in memory:
        assert row["frozen, MiB"] == f"{sizes[row['base']] / 2**20:,.1f}"
        assert (row["trained"], row["gradients"], row["AdamW"]) == ("16.0", "16.0", "32.0")
        assert row["together"] == f"{sizes[row['base']] / 2**20 + 64:,.1f}"


def test_all_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--payload", "nf4", "--base", "bfloat16", "--layers", "0", "--tokens", "0"]) == 0
    for table in tables(capsys.readouterr().out):
        assert [row["model"] for row in table] == [
            "llama-7b",
            "llama3-8b",
            "qwen2-7b",
            "mistral-7b",
            "roberta-base",
        ]


def test_a_directory_with_a_configuration_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    assert (
        main(
            [
                "--model",
                str(tmp_path),
                "--rank",
                "2",
                "--batch-size",
                "3",
                "--tokens",
                "9",
            ]
        )
        == 0
    )
    (row,), _, memory = tables(capsys.readouterr().out)
    assert (row["ranks"], row["trained parameters"]) == ("2", f"{4 * 2 * 128:,}")
    kept = [float(row["activations of 3 x 9 tokens"]) for row in memory]
    assert kept[0] > kept[1] == kept[2] == kept[3] > 3 * 8 * 96 * 4 / 2**20, (
        "the logits alone are more"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model", "llama"], "no known shape (llama-7b,"),
        (["--rank", "0"], "lora.rank = 0"),
        (["--model", "qwen2-7b", "--rank", "600"], "600 is larger than a side of attn.v"),
        (["--layers", "x"], "lora.layers = 'x'"),
        (["--num-clients", "0"], "--num-clients 0: must be at least 1"),
        (["--tokens", "1"], "--tokens 1: nothing is predicted"),
    ],
)
def test_mistakes_are_told_without_a_table(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert not printed.out
