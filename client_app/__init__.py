"""What runs at a site, beside its private data."""
