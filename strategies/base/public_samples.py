"""Calibration samples from a public text for work at the server, and a check of that text."""

from filecmp import cmp
from pathlib import Path

from torch import Tensor

from espalier.data.public_text import public_text
from espalier.data.samples import evaluation_samples
from espalier.errors import InputError
from espalier.hf.opening.opened import OpenedModel
from espalier.settings.evaluation import BUILT_IN_TEXTS
from espalier.settings.method import PublicTextSettings
from espalier.settings.run import RunSettings


def public_samples(settings: RunSettings, job: PublicTextSettings, model: OpenedModel) -> Tensor:
    """Return samples of the public text, shape (samples, tokens), int64.

    Raises InputError if the file is missing, empty, not UTF-8, or too short for one sample.
    """
    path = "" if job.public_text in BUILT_IN_TEXTS else job.public_text
    what = f"{settings.method}.public-text"
    return evaluation_samples(
        public_text(job.public_text, path, what),
        model.encode,
        settings.evaluation.sequence_length,
        job.public_samples,
        what,
    )


def require_public_text(settings: RunSettings, job: PublicTextSettings) -> None:
    """Raise InputError if the public text is an evaluation text or the test file."""
    method = settings.method
    chosen = job.public_text
    texts = settings.evaluation.named_texts()
    if chosen in BUILT_IN_TEXTS:
        same = chosen in texts
    else:
        paths = [path for path in (*texts.values(), settings.task.test_path) if path]
        same = any(_same(_file(chosen), _file(path)) for path in paths)
    if same:
        raise InputError(
            f"{method}.public-text = '{chosen}': evaluation.texts names the same text, so models"
            " would be made for the text on which they are tested; name another text"
        )


def _file(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _same(one: Path, other: Path) -> bool:
    """Return True for the same file or bytes; unreadable files are reported elsewhere."""
    try:
        return one == other or cmp(one, other, shallow=False)
    except OSError:
        return False
