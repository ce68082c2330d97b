"""``espalier chat``: conversation with the result of a run in the terminal."""

import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from espalier.errors import EspalierError, InputError, as_command, tell
from espalier.results.finished_run import open_run
from espalier.results.sources import (
    Source,
    bases_of,
    client_of,
    model_directory,
    require_adapter_for_base,
    require_text_model,
    result_of,
)
from espalier.results.use.conversation import NO_TEMPLATE, Answering, Conversation
from espalier.results.use.loading import load_model, load_source_tokenizer

CLEAR = "/clear"
QUIT = "/quit"


def conversations(document: Mapping[str, Any]) -> list[Conversation]:
    """Load the models of a request and return a conversation with each, base models first.

    Raises InputError if there is no such model, it cannot be loaded, or it writes no text.

    Parameters
    ----------
    document : as for ``main``
    """
    sources = _sources(document)
    for source in sources:
        require_text_model(source)
    answering = Answering(document["max_new_tokens"], document["temperature"], document["system"])
    return [_opened(source, answering, document["device"]) for source in sources]


def _sources(document: Mapping[str, Any]) -> list[Source]:
    """Return the models to talk to: base models first, then the result, or one model directory."""
    base = document["base"]
    client = document["client"]
    if (model := model_directory(document["run"])) is not None:
        if base or client is not None or document["compare"]:
            raise InputError(
                f"{document['run']}: is a model directory; --base, --client and --compare need a"
                " run"
            )
        return [model]
    run = open_run(document["run"])
    if base and not document["compare"]:
        require_adapter_for_base(run, base, "--base")
    asked = client_of(run, client) if client is not None else result_of(run, base)
    return [*bases_of(run, base), asked] if document["compare"] else [asked]


def _opened(source: Source, answering: Answering, device: str) -> Conversation:
    tokenizer = load_source_tokenizer(source)
    return Conversation(source.name, load_model(source, device), tokenizer, answering)


class Screen:
    """Output of answers: one below the other, or side by side on a terminal.

    Parameters
    ----------
    console : the terminal or file
    names : names of the models, in their order
    """

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console = console
        self._names = names
        self._is_split = console.is_terminal and len(names) > 1
        self._texts: dict[str, str] = {}

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Show the answers of one turn in this block."""
        self._texts = dict.fromkeys(self._names, "")
        if not self._is_split:
            yield
            return
        with Live(get_renderable=self._columns, console=self._console, refresh_per_second=8):
            yield

    @contextmanager
    def answer(self, name: str) -> Iterator[Callable[[str], None]]:
        """Yield the function that receives the answer of one model, piece by piece."""

        def split(piece: str) -> None:
            self._texts[name] += piece

        if self._is_split:
            yield split
            return
        if len(self._names) > 1:
            self._console.print(f"{name}:", markup=False, highlight=False)
        yield self._write
        self._write("\n")

    def _write(self, piece: str) -> None:
        self._console.file.write(piece)
        self._console.file.flush()

    def _columns(self) -> RenderableType:
        width = max(10, self._console.width // len(self._names) - 1)
        panels = [Panel(Text(text), title=name, width=width) for name, text in self._texts.items()]
        return Columns(panels)


def answer_all(talks: Sequence[Conversation], text: str, screen: Screen) -> int:
    """Let each model answer a text, and return the largest number of turns that one forgot."""
    forgotten = [0]
    with screen.turn():
        for talk in talks:
            with screen.answer(talk.name) as write:
                forgotten.append(talk.answer(text, write))
    return max(forgotten)


def talk_until_end(talks: Sequence[Conversation], screen: Screen) -> None:
    """Read texts from standard input and answer them, until it ends or says ``/quit``."""
    prompt = "you: " if sys.stdin.isatty() else ""
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes that are no UTF-8 are refused line by line, and do not end the chat.
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            text = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            if prompt:
                print()
            return
        if text == QUIT:
            return
        if text == CLEAR:
            for talk in talks:
                talk.turns.clear()
            tell("the conversation begins again")
        elif text:
            try:
                forgotten = answer_all(talks, text, screen)
            except EspalierError as error:
                tell(error)
                continue
            if forgotten:
                tell(f"the oldest turns ({forgotten}) no longer fit and were left out")


def _silence_libraries() -> None:
    """Keep warnings and progress bars of libraries out of the conversation."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)


@as_command
def main(document: Mapping[str, Any]) -> None:
    """Answer one prompt, or talk until the user ends the chat.

    Parameters
    ----------
    document : ``run``, ``client``, ``base``, ``compare``, ``device``, ``prompt``, ``system``,
        ``max_new_tokens``, ``temperature`` and ``seed``
    """
    import torch

    _silence_libraries()
    torch.manual_seed(document["seed"])
    talks = conversations(document)
    screen = Screen(Console(), [talk.name for talk in talks])
    # The last model is the result, after the base model.
    if not talks[-1].has_template:
        tell(NO_TEMPLATE)
    if document["prompt"] is not None:
        answer_all(talks, document["prompt"], screen)
        return
    if sys.stdin.isatty():
        # The import gives ``input`` line editing and a history.
        import readline  # noqa: F401

        tell(f"{CLEAR} forgets the conversation, {QUIT} or Ctrl-D ends it, Ctrl-C stops an answer")
    talk_until_end(talks, screen)
