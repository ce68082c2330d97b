"""Budget of a site: draws compose over runs and restarts, and no answer draws twice."""

import json
from pathlib import Path

import pytest

from espalier.errors import EspalierError
from espalier.privacy.accounting import Draw, epsilon_of
from espalier.privacy.budget import Budget
from espalier.privacy.guarantee import Guarantee
from espalier.privacy.run_filter import filtered_epsilon
from espalier.storage.client_state import collect_old_runs, remove_run

pytest.importorskip("opacus", reason="needs the extra privacy")

DELTA = 1e-5
DRAW = Draw(5.0, 1.0, 1)
ONE = epsilon_of([DRAW], DELTA)
TWO = epsilon_of([DRAW] * 2, DELTA)


def budget(root: Path, most: float = 0.0) -> Budget:
    """Return the budget as a new process of the site would open it."""
    return Budget(root, "site-a", most, DELTA)


def spent(root: Path) -> float:
    own = budget(root)
    return own.epsilon(own.spent())


def of(draw: Draw, answers: int = 1) -> Guarantee:
    """Return the guarantee of a run with this draw in each of its answers."""
    return Guarantee(draw, answers, DELTA, "secure")


GUARANTEE = of(DRAW)


def test_draws_of_all_runs_compose_over_restarts(tmp_path: Path) -> None:
    assert spent(tmp_path) == 0
    budget(tmp_path).draw("run-1", 1, GUARANTEE)
    assert spent(tmp_path) == ONE
    budget(tmp_path).draw("run-1", 2, GUARANTEE)
    budget(tmp_path).draw("run-2", 1, of(Draw(2.0, 0.1, 7)))
    assert spent(tmp_path) == epsilon_of([DRAW, DRAW, Draw(2.0, 0.1, 7)], DELTA)


def test_the_end_of_a_run_gives_nothing_back(tmp_path: Path) -> None:
    budget(tmp_path).draw("run-1", 1, GUARANTEE)
    remove_run(tmp_path, "run-1")
    collect_old_runs(tmp_path, 1e12)
    assert spent(tmp_path) == ONE


def test_a_repeated_request_draws_once(tmp_path: Path) -> None:
    """The work failed before an answer was stored, so nothing had left the site."""
    for _ in range(3):
        budget(tmp_path, ONE).draw("run-1", 1, GUARANTEE)
    assert spent(tmp_path) == ONE


def test_an_answer_that_is_lost_is_not_computed_again(tmp_path: Path) -> None:
    budget(tmp_path).draw("run-1", 1, GUARANTEE)
    for _ in range(2):
        budget(tmp_path).note_answered("run-1", 1)
    assert len(budget(tmp_path).path.read_text().splitlines()) == 2
    with pytest.raises(EspalierError, match="answered round 1 with noise, and the stored answer"):
        budget(tmp_path).draw("run-1", 1, GUARANTEE)
    budget(tmp_path).draw("run-1", 2, GUARANTEE)


def test_a_draw_beyond_the_budget_is_refused_with_the_number(tmp_path: Path) -> None:
    most = (ONE + TWO) / 2
    budget(tmp_path, most).draw("run-1", 1, GUARANTEE)
    with pytest.raises(
        EspalierError, match=rf"max-epsilon = {most:g}.* would have spent {TWO:.3f}"
    ):
        budget(tmp_path, most).draw("run-1", 2, GUARANTEE)
    assert spent(tmp_path) == ONE


def test_a_run_is_compared_as_a_whole_before_it_begins(tmp_path: Path) -> None:
    own = budget(tmp_path, (ONE + TWO) / 2)
    assert own.exceeded_by("run-1", [DRAW]) == ""
    assert f"earlier runs have spent 0.000, and with this run it would be {TWO:.3f}" in (
        own.exceeded_by("run-1", [DRAW, DRAW])
    )
    own.draw("run-1", 1, GUARANTEE)
    # What a run drew already is part of what it plans.
    assert own.exceeded_by("run-1", [DRAW]) == ""
    assert f"have spent {ONE:.3f}" in own.exceeded_by("run-2", [DRAW])
    assert budget(tmp_path).exceeded_by("run-2", [DRAW] * 50) == ""


def test_later_runs_may_be_chosen_in_view_of_replies(tmp_path: Path) -> None:
    """Several runs are composed by divergences of the order that the first plan determines."""
    own = budget(tmp_path, 2.0)
    own.draw("run-1", 1, of(DRAW, answers=2))
    later = Draw(2.0, 0.1, 7)
    total = filtered_epsilon([DRAW] * 2, [DRAW, later], 2.0, DELTA)
    assert own.epsilon(own.spent(), "run-2", [later]) == total > epsilon_of([DRAW, later], DELTA)
    own.draw("run-2", 1, of(later))
    assert own.epsilon(own.spent()) == total
    # Without a maximum nothing is decided by the number.
    assert spent(tmp_path) == epsilon_of([DRAW, later], DELTA)


def test_other_noise_under_the_name_of_a_run_counts_as_another_run(tmp_path: Path) -> None:
    """A server may reuse a name after the site has removed the run's settings."""
    later = Draw(2.0, 0.1, 7)
    for root, name in ((tmp_path / "new", "run-2"), (tmp_path / "same", "run-1")):
        own = budget(root, 2.0)
        own.draw("run-1", 1, of(DRAW, answers=2))
        own.draw(name, 2, of(later))
        total = filtered_epsilon([DRAW] * 2, [DRAW, later], 2.0, DELTA)
        assert own.epsilon(own.spent()) == total


def test_a_first_run_that_fits_only_by_the_smaller_bound_is_the_only_one(tmp_path: Path) -> None:
    own = budget(tmp_path, TWO)
    plan = [DRAW] * 2
    assert own.exceeded_by("run-1", plan) == ""
    assert filtered_epsilon(plan, plan, TWO, DELTA) > TWO
    own.draw("run-1", 1, of(DRAW, answers=2))
    # Otherwise the server could stop the run or begin another one, as its first reply says.
    assert "with this run it would be" in own.exceeded_by("run-2", [Draw(4000.0, 1.0, 1)])
    own.draw("run-1", 2, of(DRAW, answers=2))


def test_sites_have_budgets_of_their_own(tmp_path: Path) -> None:
    budget(tmp_path).draw("run-1", 1, GUARANTEE)
    assert not Budget(tmp_path, "site-b", 1.0, DELTA).spent().draws


def test_other_noise_for_the_same_answer_is_refused(tmp_path: Path) -> None:
    budget(tmp_path).draw("run-1", 1, GUARANTEE)
    with pytest.raises(EspalierError, match="begun here with other noise"):
        budget(tmp_path).draw("run-1", 1, of(Draw(1.0, 1.0, 1)))


@pytest.mark.parametrize(
    "harm", ["changed", "removed", "cut off", "emptied", "another site's", "gone"]
)
def test_a_damaged_log_is_no_empty_budget(tmp_path: Path, harm: str) -> None:
    for place in (1, 2, 3):
        budget(tmp_path).draw("run-1", place, GUARANTEE)
    path = budget(tmp_path).path
    lines = path.read_text().splitlines(keepends=True)
    if harm == "changed":
        lines[1] = json.dumps(json.loads(lines[1]) | {"noise_multiplier": 500.0}) + "\n"
    elif harm == "removed":
        del lines[1]
    elif harm == "cut off":
        del lines[2]
    elif harm == "emptied":
        lines.clear()
    else:
        other = Budget(tmp_path, "site-b", 1.0, DELTA)
        other.draw("run-1", 1, GUARANTEE)
        lines = other.path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines))
    if harm == "gone":
        path.unlink()
    for read in (spent, lambda root: budget(root).draw("run-2", 1, GUARANTEE)):
        with pytest.raises(EspalierError, match="privacy budget is damaged"):
            read(tmp_path)


def test_a_torn_entry_was_no_draw(tmp_path: Path) -> None:
    """A process that ended while it wrote had not begun its work."""
    budget(tmp_path).draw("run-1", 1, GUARANTEE)
    torn = {"entry": "draw", "run": "run-1", "round": 1, "noise_multiplier": 1e9}
    whole = budget(tmp_path).path.read_text()
    for text in (json.dumps(torn), '{"entry":"draw"}', '{"before":"0cc6'):
        budget(tmp_path).path.write_text(whole + text)
        assert spent(tmp_path) == ONE
    budget(tmp_path).draw("run-1", 2, GUARANTEE)
    assert spent(tmp_path) == TWO


def test_a_log_with_an_entry_more_than_noted_is_whole(tmp_path: Path) -> None:
    """A process may end between its entry and the note of its hash."""
    budget(tmp_path).draw("run-1", 1, GUARANTEE)
    note = budget(tmp_path).path.with_suffix(".head")
    before = note.read_text()
    budget(tmp_path).draw("run-1", 2, GUARANTEE)
    note.write_text(before)
    assert spent(tmp_path) == TWO


def test_a_log_of_several_entries_needs_its_note(tmp_path: Path) -> None:
    """Otherwise entries at its end could be removed with the note."""
    budget(tmp_path).draw("run-1", 1, GUARANTEE)
    note = budget(tmp_path).path.with_suffix(".head")
    note.unlink()
    assert spent(tmp_path) == ONE
    budget(tmp_path).draw("run-1", 2, GUARANTEE)
    for content in (None, "", "\n"):
        note.unlink(missing_ok=True)
        if content is not None:
            note.write_text(content)
        with pytest.raises(EspalierError, match=r"head beside it is missing or empty"):
            spent(tmp_path)


def test_only_the_owner_reads_the_log(tmp_path: Path) -> None:
    budget(tmp_path).draw("run-1", 1, GUARANTEE)
    assert budget(tmp_path).path.stat().st_mode & 0o077 == 0
    assert budget(tmp_path).path.parent.stat().st_mode & 0o077 == 0
