"""Reference of all settings, generated from their schema."""
