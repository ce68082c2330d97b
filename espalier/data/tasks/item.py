"""Item of a task: a question, its possible answers and the index of the correct one."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Item:
    """Question of a task, as the strings that a language model sees.

    A question with a written answer has this answer as its only option.

    Raises
    ------
    ValueError
        The number of contexts does not match the options, or ``answer`` is not the index of one.
    """

    contexts: tuple[str, ...]
    """Text before the option: one for all options, or one per option (winogrande)."""
    options: tuple[str, ...]
    """Possible continuations as written, without the delimiter."""
    answer: int
    """Index of the correct option; for an encoder, the class."""
    delimiter: str = " "
    """Text between a context and an option."""
    label: str = ""
    """Class or category for the partition among clients; empty if the task has none."""
    texts: tuple[str, ...] = ()
    """Input of an encoder, a text or a pair; empty if the task is not a classification."""
    where: str = field(default="", compare=False)
    """File and line, or dataset and record, of the item, for errors."""

    question: str = ""
    """Question without the options; empty if the contexts are exactly that."""

    def __post_init__(self) -> None:
        if len(self.contexts) not in (1, len(self.options)):
            raise ValueError(
                f"{len(self.contexts)} contexts for {len(self.options)} options; give one"
                " context, or one per option"
            )
        if not 0 <= self.answer < len(self.options):
            raise ValueError(
                f"answer {self.answer} is not the index of one of {len(self.options)} options"
            )

    @property
    def text(self) -> str:
        """Question without its options, whose hash decides the partition and the held-out split.

        Options are left out, so that a question with other options or another answer is on the same
        side.
        """
        return self.question or "\n".join(self.contexts)

    @property
    def requests(self) -> tuple[tuple[str, str], ...]:
        """Context and continuation of every option; the continuation begins with the delimiter."""
        contexts = self.contexts if len(self.contexts) > 1 else self.contexts * len(self.options)
        return tuple(
            (context, self.delimiter + option)
            for context, option in zip(contexts, self.options, strict=True)
        )

    @property
    def prompt(self) -> str:
        """Context of the correct option."""
        return self.requests[self.answer][0]

    @property
    def gold(self) -> str:
        """Correct option, as written."""
        return self.options[self.answer]
