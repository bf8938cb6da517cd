"""Algorithm 1: the device's program.

`program` is all of it.
"""
