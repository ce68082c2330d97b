"""Results of a run: each kind is written, checked, evaluated and compared."""
