"""Import the libraries of SuperLink, node and run, so that the image contains their bytecode.

A library that the build damaged fails here.
"""

import importlib
from importlib.metadata import entry_points

LIBRARIES = (
    "torch",
    "numba",
    "peft",
    "accelerate",
    "cryptography.x509",
    "tokenizers",
    "safetensors.torch",
    "rich.progress",
    "jinja2",
    "matplotlib.backends.backend_svg",
)
PROGRAMS = ("flwr", "flower-superlink", "flower-supernode", "flwr-serverapp", "flwr-clientapp")
"""Commands of Flower; that of simulations needs Ray, which the image does not have."""
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "olmo2", "gemma2", "gemma3",
    "phi3", "mixtral", "qwen3_moe", "opt", "bert", "roberta",
)  # fmt: skip

if __name__ == "__main__":
    for name in (
        *LIBRARIES,
        *(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES),
    ):
        importlib.import_module(name)
    for program in PROGRAMS:
        (script,) = entry_points(group="console_scripts", name=program)
        script.load()
