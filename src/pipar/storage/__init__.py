"""The files of a run.

Reading order: `run_folder` (writing them), `result` (reading them from Python), `checkpoint` (the format of a
checkpoint), `checkpoint_writer` (saving checkpoints during training).
"""
