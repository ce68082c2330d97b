"""Smaller models: structures without some groups, as models and as files."""
