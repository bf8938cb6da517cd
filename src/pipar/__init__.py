"""Pipelined split federated learning across real devices, and their testbed in virtual time."""

__version__ = "0.1.0"
