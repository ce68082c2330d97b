"""Loading of a run's models as transformers and PEFT models without code from their directories."""

from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING

from espalier.environment.bounded_json import read_json_object
from espalier.environment.hub_models import ADAPTER
from espalier.environment.json_form import Form, require_form
from espalier.errors import EspalierError, InputError
from espalier.hf.opening.opened_model import opened_in
from espalier.hf.tokenizer.files import load_tokenizer
from espalier.models.adapter_config import num_labels_of, read_adapter_config
from espalier.results.sources import Source

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LIBRARY_ERRORS = (
    OSError, ValueError, RuntimeError, TypeError, AttributeError, LookupError, ArithmeticError,
)  # fmt: skip
"""Errors of transformers and PEFT for files that they cannot use."""


def device_named(name: str) -> "torch.device":
    """Return a device: ``cpu``, ``cuda``, or with ``auto`` CUDA if there is a device.

    Raises InputError if there is no such device.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device {name!r}: choose auto, cpu or cuda")
    if name == "cuda" and not has_cuda:
        raise InputError("device 'cuda': this machine has no CUDA device; use cpu")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def load_model(source: Source, device: str = "auto") -> "PreTrainedModel | PeftModel":
    """Load a model in the number format of its files, for inference.

    The classes of pruned models come from this program, so no code of a directory runs. Raises
    InputError if the device does not exist, or the files cannot be loaded.

    Returns
    -------
    Model of transformers; a PeftModel if the source has an adapter.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    place = device_named(device)
    _require_config_files(source)
    try:
        model = loader_of(source)()
    except EspalierError:
        raise
    except (*LIBRARY_ERRORS, SafetensorError, StrictDataclassError) as error:
        where = source.adapter or source.directory
        raise InputError(f"{where}: cannot be loaded ({error}); check the run directory") from None
    return model.to(place)


class _GenerationConfig(Form):
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    max_length: int | None = None


def _require_config_files(source: Source) -> None:
    """Raise InputError if a value would fail later, in a library."""
    if source.adapter is not None:
        read_adapter_config(source.adapter / ADAPTER)
    path = source.directory / "generation_config.json"
    if path.is_file():
        remedy = "correct it, or restore the file from a backup"
        require_form(_GenerationConfig, read_json_object(path), str(path), remedy)


def loader_of(source: Source, dtype: str = "auto") -> "Callable[[], PreTrainedModel | PeftModel]":
    """Return a function that loads a model for inference; its libraries are imported already.

    ``dtype`` is the number format of the weights, by default that of the files.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from espalier.hf.structured.configuration import load_config

    adapter = source.adapter
    if adapter is not None:
        from peft import PeftModel
    is_decoder = opened_in(source.directory).family.kind == "decoder"
    kind = AutoModelForCausalLM if is_decoder else AutoModelForSequenceClassification
    labels = {} if is_decoder or adapter is None else {"num_labels": num_labels_of(adapter)}
    config = load_config(source.directory, **labels)
    # transformers imports the code of a family when the first model of it is built.
    with torch.device("meta"):
        kind.from_config(deepcopy(config))

    def load() -> "PreTrainedModel | PeftModel":
        model = kind.from_pretrained(
            source.directory, config=config, local_files_only=True, dtype=dtype
        )
        if adapter is not None:
            model = PeftModel.from_pretrained(model, str(adapter))
        return model.eval()

    return load


def load_source_tokenizer(source: Source) -> "PreTrainedTokenizerBase":
    """Load the tokenizer: that of the adapter if it has one, otherwise the model's.

    Raises InputError if it cannot be loaded.
    """
    adapter = source.adapter
    has_own = adapter is not None and (adapter / "tokenizer_config.json").is_file()
    return load_tokenizer(adapter if adapter is not None and has_own else source.directory)
