"""Use of a run's result: loading, evaluation with lm-evaluation-harness, and chat."""
