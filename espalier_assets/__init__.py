"""The demo model of Espalier: a small LLaMA-shaped model trained on the documentation text of Python itself.

It is a package of its own so that pip installs the weights beside the code: a Flower bundle carries text files only.
"""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "demo"
"""Directory of the demo model, in Hugging Face layout."""
