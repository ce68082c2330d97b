"""Lines of Python that load a result: for model cards and for the report."""

import json

from espalier.hf.opening.opened_model import OpenedModel


def how_to_load(
    model: OpenedModel, place: str, *, as_adapter: bool, own_code: bool, num_labels: int = 0
) -> str:
    """Return the lines for a card that load a model, or an adapter of this model, as Markdown.

    Parameters
    ----------
    place : name or path for ``from_pretrained``
    own_code : the code that builds the model is in its directory
    num_labels : number of labels of an adapter for an encoder, which its configuration lacks
    """
    decoder = model.family.kind == "decoder"
    lines = loading_code(
        place, decoder=decoder, as_adapter=as_adapter, own_code=own_code, num_labels=num_labels
    )
    return f"```python\n{lines}\n```"


def loading_code(
    place: str,
    *,
    decoder: bool,
    as_adapter: bool,
    own_code: bool,
    tokenizer: str = "",
    num_labels: int = 0,
    base: str = "",
) -> str:
    """Return the lines that load a model, or an adapter over its base model.

    Parameters
    ----------
    place, own_code, num_labels : as for ``how_to_load``
    decoder : whether the model writes text; otherwise it classifies texts
    tokenizer : name or path of a tokenizer to load too; empty for none
    base : path of the base model, if it is not the one that the adapter names
    """
    task = "CausalLM" if decoder else "SequenceClassification"
    by_adapter = as_adapter and not base
    library, auto = ("peft", "AutoPeftModelFor") if by_adapter else ("transformers", "AutoModelFor")
    loader = f"{auto}{task}"
    imports = {library: [loader]} if not base else {"peft": ["PeftModel"], library: [loader]}
    # PEFT does not read it from the files of an adapter.
    labels = f", num_labels={num_labels}" if as_adapter and not decoder else ""
    trust = ", trust_remote_code=True" if own_code else ""
    first = base or place
    lines = [f"model = {loader}.from_pretrained({_quoted(first)}{labels}{trust})"]
    if base:
        lines.append(f"model = PeftModel.from_pretrained(model, {_quoted(place)})")
    if tokenizer:
        imports.setdefault("transformers", []).append("AutoTokenizer")
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({_quoted(tokenizer)})")
    head = [f"from {name} import {', '.join(classes)}" for name, classes in imports.items()]
    return "\n".join([*head, "", *lines])


def _quoted(text: str) -> str:
    # A JSON string is also one of Python, in double quotes.
    return json.dumps(text, ensure_ascii=False)
