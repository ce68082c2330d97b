"""Command ``espalier export``."""

from espalier.cli import Commands
from espalier.launch.app import calls

TARGETS = ("transformers", "gguf", "imatrix", "hub")
DTYPES = ("float32", "float16", "bfloat16")


def add_export(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "export", help="write the result of a run for transformers, llama.cpp or the hub"
    )
    parser.add_argument(
        "source", metavar="RUN | MODEL", help="run directory, or directory of a model"
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=TARGETS,
        help="transformers: a model directory, with the adapter merged; gguf: a file for llama.cpp"
        " and Ollama; imatrix: llama.cpp's importance matrix, from a run of pooled-pruning; hub: a"
        " repository of the Hugging Face hub",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="new directory to write")
    parser.add_argument(
        "--adapter", action="store_true", help="export the adapter by itself; default: merged"
    )
    parser.add_argument(
        "--client", default="", metavar="NAME", help="export a client's own model, by its name"
    )
    parser.add_argument(
        "--base",
        metavar="MODEL",
        help="base model of an adapter, if it is no longer where the run found it",
    )
    parser.add_argument(
        "--dtype",
        default="",
        choices=DTYPES,
        help="format of the matrices in a GGUF file; default: that of the model's files",
    )
    parser.add_argument(
        "--repository", default="", metavar="OWNER/NAME", help="repository on the hub"
    )
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument(
        "--license",
        default="",
        metavar="ID",
        help="licence for the card; default: that of the base model's card",
    )
    options = (
        "source", "to", "out", "adapter", "client", "base", "dtype", "repository", "private",
        "license",
    )  # fmt: skip
    parser.set_defaults(execute=calls("espalier.results.export.command", *options))
