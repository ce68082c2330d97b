"""Export of results for other programs, and for the Hugging Face hub."""
