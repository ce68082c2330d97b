"""What a run was said to take, held against what it took."""
