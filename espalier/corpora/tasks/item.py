"""An item: a question, what may follow it, and which of that is right."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Item:
    """One question of a task, in the strings that a language model sees.

    A question with a written answer, not a choice, has that answer as its only option. Raises ValueError where the parts do not
    fit together.
    """

    contexts: tuple[str, ...]
    """What comes before the option: one for all options, or one per option (winogrande)."""
    options: tuple[str, ...]
    """What may follow, as written, without the delimiter."""
    answer: int
    """Place of the right option; for an encoder, the class."""
    delimiter: str = " "
    """What stands between a context and an option."""
    label: str = ""
    """Class or category by which items can be dealt out to clients; empty where the task has none."""
    texts: tuple[str, ...] = ()
    """What an encoder reads, a text or a pair; empty where the task is not a classification."""
    where: str = field(default="", compare=False)
    """The file and line, or dataset and record, that it was read from; for error messages."""

    question: str = ""
    """What is asked, without the options; empty where the contexts are just that."""

    def __post_init__(self) -> None:
        if len(self.contexts) not in (1, len(self.options)):
            raise ValueError(
                f"{len(self.contexts)} contexts for {len(self.options)} options; there must be one"
                " or as many"
            )
        if not 0 <= self.answer < len(self.options):
            raise ValueError(
                f"answer {self.answer} is not the place of one of {len(self.options)} options"
            )

    @property
    def text(self) -> str:
        """The question without its options, by which the item is split and dealt out.

        Options are left out so that a question that occurs again with other options or another answer stays on one side.
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
        """Context of the right option."""
        return self.requests[self.answer][0]

    @property
    def gold(self) -> str:
        """The right option, as written."""
        return self.options[self.answer]
