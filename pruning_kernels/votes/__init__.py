"""Packed masks, vote counts and means of kept weights."""
