"""Choosing plans: the split point P, the number of micro-batches N and the encoding of every device.

Reading order: `fleet` (what is planned for), `costs` and `stage_times` (how long work takes), `candidates` (the
plans of one device), `paper_estimate` (the paper's formula), `simulator` (all devices together; `pruning` stops what
is too slow), `timing` (its result), `search` (the choice; `large_fleets` for many kinds, `exhaustive` for all
plans), `encoding`, `exchange` (sending models), `compute_load` (how long machines compute), `calibration` (learning
from epochs), `predictor` (the next epoch), `replanner` (when to choose again), `background_search` (choosing while a
training runs). Nothing here imports torch.
"""
