"""Calibration samples from a public text for work at the server, and a check of that text."""

from filecmp import cmp
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from espalier.data.public_text import public_text
from espalier.data.samples import evaluation_samples
from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.method import PublicTextSettings
from espalier.settings.run import RunSettings
from espalier.settings.tables.evaluation import BUILT_IN_TEXTS
from pruning_kernels.votes.vote_counter import vote_counter


def public_samples(settings: RunSettings, job: PublicTextSettings, model: OpenedModel) -> Tensor:
    """Return samples of the public text, shape (samples, tokens), int64.

    Raises InputError if the file is missing, empty, not UTF-8, or too short for one sample.
    """
    path = "" if job.public_text in BUILT_IN_TEXTS else job.public_text
    what = "public.text"
    return evaluation_samples(
        public_text(job.public_text, path, what),
        model.encode,
        settings.evaluation.sequence_length,
        job.public_samples,
        what,
    )


def require_public_text(settings: RunSettings, job: PublicTextSettings) -> None:
    """Raise InputError if the public text is an evaluation text or the test file."""
    chosen = job.public_text
    texts = settings.evaluation.named_texts()
    if chosen in BUILT_IN_TEXTS:
        # The content decides, since a copy under another name is the same text.
        same = chosen in texts
    else:
        paths = [path for path in (*texts.values(), settings.task.test_path) if path]
        same = any(_same(_file(chosen), _file(path)) for path in paths)
    if same:
        raise InputError(
            f"public.text = '{chosen}': evaluation.texts names the same text, so models"
            " would be made for the text on which they are tested; name another text"
        )


def _file(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _same(first: Path, second: Path) -> bool:
    """Return True for the same file or bytes; unreadable files are reported elsewhere."""
    try:
        return first == second or cmp(first, second, shallow=False)
    except OSError:
        return False


WEIGHTS = 64
VOTERS = 9


def require_counting(device: torch.device, asked: str) -> None:
    """Check with a small example that votes can be counted on ``device``.

    The CPU needs no check. On a CUDA device, Triton must compile a kernel first. The check runs
    before clients have spent time on the run. Raises InputError if Triton is missing, finds no C
    compiler or does not support the GPU, or if the counts are wrong; ``asked`` is the setting.
    """
    if device.type == "cpu":
        return
    try:
        counter = vote_counter((1, WEIGHTS), VOTERS, device)
        # The lowest bit of the word is set in all masks: one weight with all votes.
        counter.count(np.full((VOTERS, 1), np.uint64(1)))
        counts = counter.counts()[0].tolist()
    # Triton, the C compiler and the driver raise exceptions of many types.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        reason = "" if counts == [VOTERS] + [0] * (WEIGHTS - 1) else "it counts the votes wrongly"
    if reason:
        raise InputError(
            f"device = '{asked}': votes cannot be counted on this machine's GPU ({reason}); Triton,"
            " which comes with torch for CUDA, compiles the kernel with a C compiler: install gcc,"
            " or set device to 'cpu'"
        )
