"""Settings of the texts and baselines with which models are compared."""

from typing import Literal

from pydantic import Field, field_validator

from espalier.settings.table import Table

BUILT_IN_TEXTS = ("documentation", "code")
"""Texts that need no file, because every Python installation contains them."""

OWN_TEXT = "own-text"
"""Name of the clients' own held-out text among the evaluation texts."""

MAX_TEXTS = 16
"""Maximum number of evaluation texts; each is one evaluation of every client's own result."""


class EvaluationSettings(Table):
    """Table ``[evaluation]``: public texts and baselines with which models are compared."""

    texts: str = Field(
        "documentation",
        description=(
            "Evaluation texts on which models are compared, comma-separated, at most 16:"
            " `documentation` and `code` (10% of the passages, which no client has), or `name=path`"
            " for a text file."
        ),
    )
    sequence_length: int = Field(256, ge=2, description="Tokens per sample of an evaluation text.")
    max_samples: int = Field(
        48, ge=0, description="Maximum number of samples per evaluation text; 0: all."
    )
    local_baseline: bool = Field(
        True,
        description=(
            "Clients evaluate their local baselines on the evaluation texts. With a tuning method"
            " this takes them another training. With `sft-p` and `fedspine` they evaluate their own"
            " models, which are the result."
        ),
    )
    own_text: bool = Field(
        False,
        description=(
            "Clients also evaluate the dense model, their own model and the federated model on"
            " held-out text of their own: 10% of their passages or items, which are never used for"
            " pruning or training. Only mean losses leave a client; the loss of each prediction is"
            " capped at 20 nats. A site of a deployment must allow it with `own-text` in its"
            " configuration."
        ),
    )
    centralized: Literal["auto", "off"] = Field(
        "auto",
        description=(
            "Compute the centralized baseline, which uses the data of all clients in one place."
            " `auto`: only in a simulation."
        ),
    )
    every: int = Field(
        0,
        ge=0,
        description=(
            "Number of rounds between evaluations at the server on the evaluation texts or test"
            " items (`rounds.json`), for methods that average adapters; 0: only at the end."
        ),
    )

    @field_validator("texts")
    @classmethod
    def _texts_are_named(cls, value: str) -> str:
        names = [part.split("=", 1)[0].strip() for part in value.split(",")]
        for part, name in zip(value.split(","), names, strict=True):
            if not name or ("=" not in part and name not in BUILT_IN_TEXTS):
                raise ValueError(
                    f"{part.strip()!r} is neither 'documentation' nor 'code' nor 'name=path'"
                )
        if OWN_TEXT in names:
            raise ValueError(f"{OWN_TEXT!r} is the name of the clients' own text; choose another")
        if len(set(names)) != len(names):
            raise ValueError("two texts have the same name")
        if len(names) > MAX_TEXTS:
            raise ValueError(f"{len(names)} texts, at most {MAX_TEXTS} are evaluated on")
        return value

    def named_texts(self) -> dict[str, str]:
        """Return the file path of each text by its name; the path of a built-in text is empty."""
        parts = [part.strip() for part in self.texts.split(",")]
        return {
            name.strip(): path.strip() for name, _, path in (part.partition("=") for part in parts)
        }
