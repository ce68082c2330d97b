"""Joint training of masks and adapters (SFT-P)."""
