"""Tensors of a checkpoint that a thread reads while others are computed with.

The thread fills memory that its owner made, and does nothing else: it starts no work of a device. What goes wrong while it
reads is told where the tensor is taken.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from torch import Tensor

from espalier.hf.files.checkpoint import Checkpoint


class ReadingAhead:
    """Reads tensors in order, into pinned memory where they will go to a CUDA device.

    Parameters
    ----------
    checkpoint : where they are
    pinned : whether a CUDA device will copy them
    """

    def __init__(self, checkpoint: Checkpoint, pinned: bool) -> None:
        self._checkpoint = checkpoint
        self._pinned = pinned
        self._thread = ThreadPoolExecutor(1, "reading-ahead")
        self._begun: dict[str, Future[Tensor]] = {}

    def begin(self, names: Sequence[str]) -> None:
        """Read these tensors; of others that nobody took none stays in memory."""
        for tensor in self._begun.values():
            tensor.cancel()
        wait(self._begun.values())
        self._begun = {}
        for name in names:
            room = self._checkpoint.room(name, self._pinned)
            self._begun[name] = self._thread.submit(self._checkpoint.read_into, name, room)

    def take(self, name: str) -> Tensor:
        """One tensor, once it is read; one that was not begun is read now.

        Raises
        ------
        Mistake
            Its file ends before it.
        OSError
            The file system refused.
        """
        begun = self._begun.pop(name, None)
        return begun.result() if begun else self._checkpoint.read(name)
