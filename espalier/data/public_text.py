"""Public evaluation texts, on which models are compared."""

from torch import Tensor

from espalier.data.builtin.built_in import public_part
from espalier.data.files.file_text import FileText
from espalier.data.windows import Encode, evaluation_windows
from espalier.settings.run import EvaluationSettings


def public_text(name: str, path: str, key: str = "evaluation.texts") -> str | FileText:
    """Return a public text: the text of a file, or the held-out part of a built-in text.

    Parameters
    ----------
    key : setting that names the text, for errors

    Raises
    ------
    InputError
        The file is missing, empty or not UTF-8.
    """
    if path:
        return FileText(path, key)
    return public_part(name)


def public_windows(
    chosen: EvaluationSettings, encode: Encode, *, built_in: bool = True
) -> dict[str, Tensor]:
    """Return windows of the texts in ``evaluation.texts`` by name: (windows, tokens), int64.

    Parameters
    ----------
    built_in : whether to include built-in texts

    Raises
    ------
    InputError
        A file is missing, empty or not UTF-8, or is shorter than one window.
    """
    return {
        name: evaluation_windows(
            public_text(name, path),
            encode,
            chosen.window_tokens,
            chosen.max_windows,
            f"evaluation.texts: '{name}'",
        )
        for name, path in chosen.named_texts().items()
        if path or built_in
    }
