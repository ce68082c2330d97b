"""Text of one client: sources, partitions, splits and token samples.

The modules take a tokenizer and open no model.
"""
