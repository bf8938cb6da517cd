"""The files of a run.

Reading order: `run_folder` (writing them), `run_lock` (one training at a time), `result` (reading them from Python),
`checkpoint` (the format of a checkpoint), `checkpoint_writer` (saving checkpoints during training).
"""
