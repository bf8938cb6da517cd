"""Deterministic simulation: the two programs of a deployment in virtual time, in a world where everything breaks."""
