"""Windows of a public text that a method's server works on, and which texts it may be."""

from filecmp import cmp
from pathlib import Path
from typing import Protocol

from torch import Tensor

from espalier.corpora.public_text import public_text
from espalier.corpora.windows import evaluation_windows
from espalier.modeling.opened import OpenedModel
from espalier.settings.mistakes import Mistake
from espalier.settings.run import BUILT_IN_TEXTS, RunSettings


class NamesPublicText(Protocol):
    """A method's table with these keys."""

    @property
    def public_text(self) -> str:
        """A built-in text, or the path of a file."""

    @property
    def public_windows(self) -> int:
        """Windows of it."""

    @property
    def public_window_tokens(self) -> int:
        """Tokens of a window."""


def public_windows(settings: RunSettings, job: NamesPublicText, model: OpenedModel) -> Tensor:
    """Windows of the public text: (windows, tokens), int64.

    Raises
    ------
    Mistake
        The file is missing, empty, not UTF-8, or has not even one window.
    """
    path = "" if job.public_text in BUILT_IN_TEXTS else job.public_text
    what = f"{settings.method}.public-text"
    return evaluation_windows(
        public_text(job.public_text, path, what),
        model.encode,
        job.public_window_tokens,
        job.public_windows,
        what,
    )


def require_public_text(settings: RunSettings, job: NamesPublicText, model: OpenedModel) -> None:
    """Refuse public text that models are compared on, and windows that are longer than the model takes.

    Raises
    ------
    Mistake
        It names the key.
    """
    method = settings.method
    chosen = job.public_text
    texts = settings.evaluation.named_texts()
    paths = {_file(path) for path in (*texts.values(), settings.task.test_path) if path}
    if (
        chosen in texts
        if chosen in BUILT_IN_TEXTS
        else any(_same(_file(chosen), path) for path in paths)
    ):
        raise Mistake(
            f"{method}.public-text = '{chosen}': models are compared on it (evaluation.texts), and"
            " would be made for what they are tested on; name another text"
        )
    positions = model.num_positions
    if positions is not None and job.public_window_tokens > positions:
        raise Mistake(
            f"{method}.public-window-tokens = {job.public_window_tokens}: the model has {positions}"
            f" positions ({model.positions_key} in its config.json); set it to {positions} or less"
        )


def _file(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _same(one: Path, other: Path) -> bool:
    """Whether two paths are one file, or files of the same bytes; what cannot be read is told elsewhere."""
    try:
        return one == other or cmp(one, other, shallow=False)
    except OSError:
        return False
