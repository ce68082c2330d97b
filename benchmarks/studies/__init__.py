"""Studies of FedPrLLM's paper, one command each.

Help: ``python -m benchmarks.studies table-1 --help``.
"""
