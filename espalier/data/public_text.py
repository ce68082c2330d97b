"""Public evaluation texts, on which models are compared."""

from torch import Tensor

from espalier.data.builtin.built_in_texts import public_part
from espalier.data.files.file_text import FileText
from espalier.data.files.formats import FORMATS, ending_of
from espalier.data.samples import Encode, evaluation_samples
from espalier.errors import InputError
from espalier.settings.tables.evaluation import EvaluationSettings


def public_text(name: str, path: str, key: str = "evaluation.texts") -> str | FileText:
    """Return a public text: the text of a file, or the held-out part of a built-in text.

    Raises InputError if the file holds records, is missing, empty or not UTF-8.

    Parameters
    ----------
    key : setting that names the text, for errors
    """
    if ending_of(path) in FORMATS:
        raise InputError(
            f"{key}: {path} is a file of records, and this text is plain text; write the texts of"
            " its records to a file whose name ends with .txt"
        )
    if path:
        return FileText(path, key)
    return public_part(name)


def public_samples(
    chosen: EvaluationSettings, encode: Encode, *, built_in: bool = True
) -> dict[str, Tensor]:
    """Return samples of the texts in ``evaluation.texts`` by name: (samples, tokens), int64.

    Raises InputError if a file is missing, empty or not UTF-8, or is shorter than one sample.

    Parameters
    ----------
    built_in : whether to include built-in texts
    """
    return {
        name: evaluation_samples(
            public_text(name, path),
            encode,
            chosen.sequence_length,
            chosen.max_samples,
            f"evaluation.texts: '{name}'",
        )
        for name, path in chosen.named_texts().items()
        if path or built_in
    }
