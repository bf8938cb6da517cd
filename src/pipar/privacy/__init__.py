"""Noise and its accounting.

Reading order: `mechanisms` (clipping, Gaussian noise, randomised labels), `accounting` (the epsilon of a number of
releases), `budget` (the releases of each device, and whether it may send another one), `budget_file` (a device's count
on its own disk).
"""
