"""Worlds in which everything breaks: `python -m simulation --seeds N`."""
