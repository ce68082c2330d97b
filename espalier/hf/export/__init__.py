"""Writers of plain Hugging Face models and adapters, with checks of the written files."""
