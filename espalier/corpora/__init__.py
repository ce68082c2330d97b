"""Text of one client: where it comes from, how it is split and cut into windows. Takes a tokenizer, opens no model."""
