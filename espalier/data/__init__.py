"""Text of one client: sources, partitions, splits and token windows.

The modules take a tokenizer and open no model.
"""
