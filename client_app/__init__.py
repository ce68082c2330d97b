"""Client side of the app: code that runs at a site, next to its private data."""
