"""Conversation with one model: prompt, streamed answer, and memory of earlier turns."""

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from espalier.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

NO_TEMPLATE = (
    "the tokenizer has no chat template; the model continues your text instead of answering it"
)


@dataclass(frozen=True)
class Answering:
    """Way in which answers are made.

    Parameters
    ----------
    max_new_tokens : maximum number of tokens of an answer
    temperature : 0 always takes the most likely token; higher values draw tokens at random
    system : system message; None for none
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    system: str | None = None


@dataclass
class Conversation:
    """Turns of a user and a model.

    Raises InputError if there is a system message, but no chat template.

    Parameters
    ----------
    name : name of the model in the display
    model : causal language model of transformers or PEFT
    tokenizer : its tokenizer
    answering : how answers are made
    """

    name: str
    model: Any
    tokenizer: "PreTrainedTokenizerBase"
    answering: Answering
    turns: list[tuple[str, str]] = field(default_factory=list)
    """Texts of the user and the answers, oldest first."""

    def __post_init__(self) -> None:
        system = self.answering.system
        if system is not None and not self.has_template:
            raise InputError(f"--system: {NO_TEMPLATE}; leave out the system message")
        _require_utf8(system or "")

    @property
    def has_template(self) -> bool:
        """True if the tokenizer has a chat template."""
        return self.tokenizer.chat_template is not None

    def answer(self, text: str, write: Callable[[str], None]) -> int:
        """Answer a text, and remember both.

        An interrupt ends the answer, of which what was written is remembered. Raises InputError if
        the text is not UTF-8, or the prompt is empty or too long for the model.

        Parameters
        ----------
        text : the user's text
        write : function that receives the answer piece by piece

        Returns
        -------
        Number of oldest turns that were forgotten because the model reads no longer text.
        """
        _require_utf8(text)
        prompt, forgotten = self._fitting(text)
        if not prompt.numel():
            raise InputError("the text is empty; the model needs a word to begin with")
        del self.turns[:forgotten]
        pieces: list[str] = []

        def on_text(piece: str) -> None:
            pieces.append(piece)
            write(piece)

        # Ctrl-C ends the answer and not the conversation.
        with suppress(KeyboardInterrupt):
            self._generate(prompt, on_text)
        self.turns.append((text, "".join(pieces)))
        return forgotten

    def _fitting(self, text: str) -> tuple["Tensor", int]:
        """Return the prompt's token ids, shape (1, tokens), and the number of turns left out."""
        limit = self._limit()
        # The answer gets at most half of what the model reads.
        room = limit - min(self.answering.max_new_tokens, limit // 2)
        # Leave out the oldest turns one by one, until the rest fits.
        for forgotten in range(len(self.turns) + 1):
            prompt = self._prompt(self.turns[forgotten:], text)
            if prompt.shape[1] <= room:
                return prompt, forgotten
        raise InputError(
            f"the text has {prompt.shape[1]} tokens, but the model reads {limit} and"
            f" {limit - room} are reserved for the answer; give a shorter text"
        )

    def _limit(self) -> int:
        return int(getattr(self.model.config, "max_position_embeddings", None) or 2048)

    def _prompt(self, turns: list[tuple[str, str]], text: str) -> "Tensor":
        """Return the token ids of a conversation that ends with the user's text."""
        if not self.has_template:
            before = "".join(f"{question}{answer}\n" for question, answer in turns)
            ids: Tensor = self.tokenizer(before + text, return_tensors="pt")["input_ids"]
            return ids
        system = self.answering.system
        messages = [] if system is None else [{"role": "system", "content": system}]
        for question, answer in turns:
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        messages.append({"role": "user", "content": text})
        try:
            encoded = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        # Templates raise errors of the template language, for example for a system message.
        except Exception as error:
            raise InputError(f"the chat template refuses the conversation: {error}") from None
        found: Tensor = encoded["input_ids"]
        return found

    def _generate(self, prompt: "Tensor", on_text: Callable[[str], None]) -> None:
        import torch
        from transformers import TextStreamer

        class Streamer(TextStreamer):
            """Streamer that passes the text on instead of printing it."""

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                if text:
                    on_text(text)

        prompt = prompt.to(self.model.device)
        config = deepcopy(self.model.generation_config)
        # transformers warns if both lengths are set.
        config.max_length = None
        config.max_new_tokens = min(self.answering.max_new_tokens, self._limit() - prompt.shape[1])
        config.do_sample = self.answering.temperature > 0
        config.temperature = self.answering.temperature or None
        if not config.do_sample:
            # transformers warns of settings that only sampling reads.
            config.top_p = config.top_k = None
        if config.pad_token_id is None:
            config.pad_token_id = self.tokenizer.eos_token_id
        with torch.inference_mode():
            self.model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                streamer=Streamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
            )


def _require_utf8(text: str) -> None:
    """Raise InputError if a text has bytes that Python could not decode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"the text {text[:40]!a} is not UTF-8; convert it") from None
