"""Report of one run: a single HTML page, with its figures, that needs no network."""
