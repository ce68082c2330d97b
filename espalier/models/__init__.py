"""Facts about models that need no torch: plans, structures and prunable groups."""
