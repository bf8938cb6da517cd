"""The files of a run.

Reading order: `run_folder` (results), `checkpoint` (its format), `checkpoint_writer` (saving while training goes
on).
"""
