"""Results of runs: what a run directory holds, and what is made of it afterwards."""
