"""Noise and its accounting.

Reading order: `mechanisms` (clipping, Gaussian noise, randomised labels), `accounting` (the epsilon of a number of
releases), `budget` (what each device has released, and what it may still), `budget_file` (the same on a device's
disk).
"""
