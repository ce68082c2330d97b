"""Times of a latency study as a Markdown table."""

from pathlib import Path

from benchmarks.reporting.rows import Rows


def write_times(title: str, rows: Rows, path: Path) -> None:
    """Write ``<path>.md``: milliseconds, and the ratio to the dense model in brackets."""
    dense = next(row for row in rows.rows if not float(row["sparsity"]))
    heads = {"prefill_ms": "8 sequences of 256 tokens, ms", "token_ms": "a token of one, ms"}
    lines = [
        f"# {title}",
        "",
        (
            f"Model `{rows.conditions['model']['name']}`, float32, threads:"
            f" {rows.conditions['threads']}; medians of 7 turns in one process, in brackets"
            f" relative to the dense model. [Figures](./{path.name}.csv),"
            f" [conditions](./{path.name}.json)."
        ),
        "",
        f"| | pruning ratio | {' | '.join(heads.values())} |",
        "|---|---|---:|---:|",
    ]
    for row in rows.rows:
        times = [
            f"{float(row[key]):.1f} ({float(row[key]) / float(dense[key]):.2f})" for key in heads
        ]
        lines.append(f"| {row['model']} | {float(row['sparsity']):.0%} | {' | '.join(times)} |")
    path.with_suffix(".md").write_text("\n".join([*lines, ""]))
