"""The files of a run.

Reading order: `whole_files` (complete or absent, tried again), `trace_file` (spans, epoch by epoch), `packed_rows` (a
row for every round, in little memory), `epoch_log` (results of epochs), `best_model` (the best model so far),
`run_names` (folders for new runs), `run_json` (what their JSON files contain), `run_folder` (writing the files of a
run), `run_lock` (one training at a time), `result` and `comparison` (reading them from Python), `result_views` (as
tables and figures), `device_table` (values by device), `checkpoint` (the format of a checkpoint), `checkpoint_writer`
(saving checkpoints during training), `audit_log` (which devices took part in a deployment).
"""
