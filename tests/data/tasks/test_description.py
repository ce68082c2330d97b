"""Description of the tasks, printed and as a page."""

from pathlib import Path

import pytest

from espalier.data.tasks.catalogue import TASKS
from espalier.data.tasks.description import PAGE, main, tasks_page
from espalier.data.tasks.fields import Fields


def test_the_page_is_up_to_date() -> None:
    """``python -m espalier.data.tasks.description`` writes it."""
    assert (Path(__file__).parents[3] / PAGE).read_text() == tasks_page()


@pytest.mark.parametrize("name", TASKS)
def test_task_is_printed_with_its_sample_prompt(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name]) == 0
    printed = capsys.readouterr().out
    item = TASKS[name].item(Fields(TASKS[name].sample, name))
    if item.conversation is not None:
        assert all(content in printed for _, content in item.conversation.messages)
        return
    for line in item.prompt.split("\n"):
        assert line.rstrip() in printed
    assert repr(item.gold) in printed


def test_an_unknown_task_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sst-2"]) == 2
    assert "'sst-2' is unknown; choose one of sst2" in capsys.readouterr().err
