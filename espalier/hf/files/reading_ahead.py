"""Background thread that reads tensors of a checkpoint during a computation.

The thread fills memory that its owner allocated and does nothing else; it launches no work on a
device. Read errors are raised when the tensor is taken.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from torch import Tensor

from espalier.hf.files.checkpoint import Checkpoint


class ReadingAhead:
    """Reader of tensors in order, into pinned memory if a CUDA device will copy them.

    Parameters
    ----------
    checkpoint : source of the tensors
    pinned : True if a CUDA device will copy the tensors
    """

    def __init__(self, checkpoint: Checkpoint, pinned: bool) -> None:
        self._checkpoint = checkpoint
        self._pinned = pinned
        self._thread = ThreadPoolExecutor(1, "reading-ahead")
        self._begun: dict[str, Future[Tensor]] = {}

    def begin(self, names: Sequence[str]) -> None:
        """Start reading these tensors, and drop earlier ones that were not taken."""
        for tensor in self._begun.values():
            tensor.cancel()
        wait(self._begun.values())
        self._begun = {}
        for name in names:
            # Pinned memory is allocated here, because the thread must not use the device.
            room = self._checkpoint.room(name, self._pinned)
            self._begun[name] = self._thread.submit(self._checkpoint.read_into, name, room)

    def take(self, name: str) -> Tensor:
        """Return one tensor when it is read; a tensor that was not requested is read now.

        Raises
        ------
        InputError
            The file is too short.
        OSError
            Reading failed.
        """
        begun = self._begun.pop(name, None)
        return begun.result() if begun else self._checkpoint.read(name)
