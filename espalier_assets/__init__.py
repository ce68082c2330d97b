"""Demo model of Espalier: a small LLaMA-style model trained on Python's documentation text.

It is a package of its own, so that pip installs the weights together with the code: a Flower bundle
contains text files only.
"""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "demo"
"""Directory of the demo model, in Hugging Face layout."""
