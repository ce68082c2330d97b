"""What each method's processes hold and compute."""
