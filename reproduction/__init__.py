"""The paper's evaluation, run on a virtual testbed: `python -m reproduction NAME`."""
