"""Mistral 7B and models of the same architecture.

The model's own code handles sliding-window attention.
"""

from dataclasses import replace

from espalier.hf.families.llama import LLAMA

MISTRAL = replace(LLAMA, name="mistral", model_types=("mistral",))
