"""The error that a user or a site can mend."""

FLOWER_REPORTS_IT_TOO = "(Flower's own report of it follows)"
"""The ServerApp prints this line after it has said why a run failed; the traceback that follows says nothing more."""

RUN_DIRECTORY = "run directory "
"""The ServerApp prints the directory of a run behind these words; whoever watches the run learns from it how to resume."""

NOT_LOADED = "could not load the run's program"
"""The ServerApp says so of a node; whoever watches the run may submit it again in another bundle."""


INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""They end the process, or the generator. Any other error concerns the work only, also if it is no ``Exception``: a library in
Rust that panics raises a ``PanicException``, which is none."""


class Mistake(ValueError):
    """Something a person can put right: it names the key or file, the value and the remedy.

    Parameters
    ----------
    text : never quotes a line of data; it is shown where it happened
    told : what leaves a real site in its place, where the text says what was counted or found in the site's data
    """

    def __init__(self, text: str, told: str | None = None) -> None:
        super().__init__(text)
        self.told = told

    @property
    def outward(self) -> str:
        """What others may read of it."""
        return str(self) if self.told is None else self.told


class StateLost(Mistake):
    """A client has lost what earlier rounds left it; where the method can, the server brings it what it needs to catch up."""
