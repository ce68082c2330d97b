"""What the tuning methods reach, measured with models and data of one's own."""
