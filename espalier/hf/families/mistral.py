"""Mistral 7B and models of its shape; sliding-window attention is the model's own affair."""

from dataclasses import replace

from espalier.hf.families.llama import LLAMA

MISTRAL = replace(LLAMA, name="mistral", model_types=("mistral",))
