"""Lines of Python that load a result: for model cards and for the report."""

import json

from espalier.hf.opening.opened_model import OpenedModel


def how_to_load(model: OpenedModel, place: str, *, as_adapter: bool, own_code: bool) -> str:
    """Return the lines for a card that load a model, or an adapter of this model, as Markdown.

    Parameters
    ----------
    place : name or path for ``from_pretrained``
    own_code : the code that builds the model is in its directory
    """
    decoder = model.family.kind == "decoder"
    lines = loading_code(place, decoder=decoder, as_adapter=as_adapter, own_code=own_code)
    return f"```python\n{lines}\n```"


def loading_code(
    place: str, *, decoder: bool, as_adapter: bool, own_code: bool, tokenizer: str = ""
) -> str:
    """Return the lines that load a model, or an adapter over its base model.

    Parameters
    ----------
    place, own_code : as for ``how_to_load``
    decoder : whether the model writes text; otherwise it classifies texts
    tokenizer : name or path of a tokenizer to load too; empty for none
    """
    library, auto = ("peft", "AutoPeftModelFor") if as_adapter else ("transformers", "AutoModelFor")
    loader = f"{auto}{'CausalLM' if decoder else 'SequenceClassification'}"
    imports = {library: [loader]}
    # The files of an adapter do not say how many classes there are.
    labels = ", num_labels=..." if as_adapter and not decoder else ""
    trust = ", trust_remote_code=True" if own_code else ""
    lines = [f"model = {loader}.from_pretrained({_quoted(place)}{labels}{trust})"]
    if tokenizer:
        imports.setdefault("transformers", []).append("AutoTokenizer")
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({_quoted(tokenizer)})")
    head = [f"from {name} import {', '.join(classes)}" for name, classes in imports.items()]
    return "\n".join([*head, "", *lines])


def _quoted(text: str) -> str:
    # A JSON string is also one of Python, in double quotes.
    return json.dumps(text, ensure_ascii=False)
