"""Trains the bundled hybrid model: python -m training.train."""
