"""Check of a parsed JSON document by its form, with place, value and reason in the error."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from espalier.errors import InputError

VALUE_CHARACTERS = 60


class Form(BaseModel):
    """Keys of an object that are read; a key with a default may be missing, others may be there."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def require_form(form: type[Form], document: Any, where: str, remedy: str) -> None:
    """Raise InputError if a document has another form.

    Parameters
    ----------
    where : path of the file, at the beginning of the error
    remedy : what to do, at its end
    """
    try:
        form.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the object"
        value = "" if first["type"] == "missing" else f" = {first['input']!r:.{VALUE_CHARACTERS}}"
        raise InputError(f"{where}: {place}{value}: {first['msg']}; {remedy}") from None
