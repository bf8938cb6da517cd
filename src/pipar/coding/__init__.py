"""Tensors at the cut in fewer bytes: exactly, or with a loss that is counted. Pure: numpy and zstandard, no torch."""
