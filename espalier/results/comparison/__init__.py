"""Comparison of runs: which can be compared, tables, and a Pareto plot."""
