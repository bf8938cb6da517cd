"""The evaluation of the paper, run again: its trainings, its tables and its figures."""
