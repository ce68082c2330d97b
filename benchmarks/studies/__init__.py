"""The studies of FedPrLLM's paper, each by one command: ``python -m benchmarks.studies table-1 --help``."""
