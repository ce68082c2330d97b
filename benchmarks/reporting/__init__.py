"""Reports of studies: rows of measurements, tables, paired comparisons and figures."""
