"""Block sizes and numbers of levels of bitsandbytes' NF4."""

BLOCK = 64
"""Number of consecutive weights of a row that share a scale."""
NESTED_BLOCK = 256
"""Number of scales that share a second-level scale, with double quantisation."""
LEVELS = 16
NESTED_LEVELS = 256
