"""Analysis of masks after a simulation of SFT-P: similarity, densities, and budgets.

All values come from the client state of simulated clients. No message contains them, so a
deployment has no such analysis.
"""

from collections.abc import Mapping
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from torch import Tensor

from espalier.hf.structured.residual_gates import Gate, ResidualGates
from espalier.models.structure import RESIDUAL_KINDS
from espalier.results.style import GREEN, STUDY_WIDTH, new_figure, save_figure, series_look
from espalier.training.mask_history import LOOKED_AT, masks_of, steps_to_budget

Masks = Mapping[Gate, Tensor]
HEIGHT = 500
"""Height of a figure in pixels."""


def mask_figures(kept: Mapping[int, Mapping[str, Any]], gates: ResidualGates) -> dict[str, Any]:
    """Return the analysis of the clients' stored masks, as JSON values.

    ``agreement`` is the fraction of residual dimensions, heads and channels on which two clients
    agree. ``chance`` is its expected value for independent random masks of the same density: ``a b
    + (1 - a)(1 - b)`` for each gate.
    """
    masks = {
        client: client_masks
        for client, history in sorted(kept.items())
        if (client_masks := masks_of(history, gates))
    }
    return {
        "agreement": [
            {"clients": [first, second], "agreement": agreement, "chance": chance}
            for first, second in combinations(masks, 2)
            for agreement, chance in [agreement_and_chance(masks[first], masks[second])]
        ],
        "density": {str(client): _densities(gate_masks) for client, gate_masks in masks.items()},
        "spent": {
            str(client): [entry["spent"] for entry in history["rounds"]]
            for client, history in sorted(kept.items())
        },
        "perplexity": {
            str(client): {str(entry["round"]): entry["perplexity"] for entry in history["rounds"]}
            for client, history in sorted(kept.items())
        },
        "late": {
            str(client): {
                "steps": len(history["fitted"]),
                "steps_to_budget": steps_to_budget(history["fitted"]),
                "spent": sum(history["fitted"][-LOOKED_AT:]) / len(history["fitted"][-LOOKED_AT:]),
            }
            for client, history in sorted(kept.items())
            if history["fitted"]
        },
    }


def agreement_and_chance(one: Masks, other: Masks) -> tuple[float, float]:
    """Return the fraction on which two clients agree, and its value at chance.

    ``mask_figures`` defines both.
    """
    dimensions = sum(len(mask) for mask in one.values())
    alike = sum(int((mask == other[gate]).sum()) for gate, mask in one.items())
    chance = 0.0
    for gate, mask in one.items():
        a = float(mask.double().mean())
        b = float(other[gate].double().mean())
        # a b + (1 - a)(1 - b): both masks keep the dimension, or both cut it.
        chance += len(mask) * (a * b + (1 - a) * (1 - b))
    return alike / dimensions, chance / dimensions


def _densities(masks: Masks) -> dict[str, list[float]]:
    return {
        kind: [float(mask.double().mean()) for (_, of), mask in sorted(masks.items()) if of == kind]
        for kind in RESIDUAL_KINDS
    }


# ----- plots -----


def draw(figures: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write ``masks-<name>.png`` and ``.svg`` for each analysis that has data."""
    perplexities = [
        value for by_round in figures["perplexity"].values() for value in by_round.values()
    ]
    drawn = []
    for name, paint, has_any in (
        ("agreement", _agreement, bool(figures["agreement"])),
        ("density", _density, bool(figures["density"])),
        ("budget", _budget, any(figures["spent"].values())),
        ("perplexity", _perplexity, any(perplexities)),
    ):
        if has_any:
            drawn.append(folder / f"masks-{name}.png")
            with new_figure(HEIGHT, STUDY_WIDTH) as figure:
                paint(figure, figures)
                save_figure(figure, drawn[-1])
    return drawn


def _agreement(figure: Any, figures: Mapping[str, Any]) -> None:
    clients = sorted({client for pair in figures["agreement"] for client in pair["clients"]})
    above = [[0.0] * len(clients) for _ in clients]
    axes = figure.subplots()
    for pair in figures["agreement"]:
        row, column = (clients.index(client) for client in pair["clients"])
        above[row][column] = above[column][row] = pair["agreement"] - pair["chance"]
    limit = max(0.01, *(abs(value) for row in above for value in row))
    image = axes.imshow(above, cmap="RdBu", vmin=-limit, vmax=limit)
    for pair in figures["agreement"]:
        row, column = (clients.index(client) for client in pair["clients"])
        text = f"{pair['agreement']:.2f}\n(chance {pair['chance']:.2f})"
        colour = "white" if abs(above[row][column]) > limit / 2 else "black"
        for x, y in ((row, column), (column, row)):
            axes.text(x, y, text, ha="center", va="center", fontsize=9, color=colour)
    names = [f"client {client}" for client in clients]
    axes.set_xticks(range(len(clients)), names)
    axes.set_yticks(range(len(clients)), names)
    axes.set_title("Fraction of residual dimensions on which two clients' masks agree")
    axes.grid(visible=False)
    figure.colorbar(image, label="above chance")


def _density(figure: Any, figures: Mapping[str, Any]) -> None:
    for axes, kind in zip(
        figure.subplots(2, 2, sharex=True, sharey=True).flat, RESIDUAL_KINDS, strict=True
    ):
        for number, (client, densities) in enumerate(figures["density"].items()):
            axes.plot(densities[kind], **_client(number, client))
        axes.set_title(kind.replace("_", " "), fontsize=10)
        axes.set_ylim(0, 1.02)
        axes.locator_params(axis="x", integer=True)
    figure.supxlabel("block")
    figure.supylabel("fraction of residual dimensions that are on")
    title = "Where residual dimensions remain, by kind of gate"
    figure.suptitle(title, x=0.008, ha="left", weight="bold", size=12)
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside right upper", fontsize=9)


def _budget(figure: Any, figures: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    axes.axhspan(0.98, 1.02, color=GREEN, alpha=0.15, label="within 2%")
    for number, (client, rounds) in enumerate(figures["spent"].items()):
        if rounds:
            steps = list(chain.from_iterable(rounds))
            axes.plot(steps, **_client(number, client) | {"marker": "", "linewidth": 1.0})
    axes.set_title("T(g) of each local step's draw; a round begins with the averaged generator")
    _label(axes, "local step", "T(g), relative to the client's target")


def _perplexity(figure: Any, figures: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    for number, (client, by_round) in enumerate(figures["perplexity"].items()):
        points = {int(number): value for number, value in by_round.items() if value is not None}
        if points:
            axes.plot(list(points), list(points.values()), **_client(number, client))
    axes.set_title("Each client's smaller model on its own held-out text")
    _label(axes, "round", "perplexity (lower is better)")


def _client(number: int, client: str) -> dict[str, Any]:
    look = series_look(number)
    return {"color": look.colour, "marker": look.marker, "label": f"client {client}"}


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(fontsize=9)
