"""Choosing plans: the split point P, the number of micro-batches N and the encoding of every device.

Reading order:

- `fleet` (what is planned for), `costs` and `stage_times` (how long work takes), `candidates` (the plans that a device
  may have) and `encoding_choice` (how its tensors are encoded)
- `paper_selection` (the paper's selection), `single_device_plan` (a plan for a device that joins), `simulator` (all
  devices together; `simulated_device` and `simulated_cores` are their state and the server's, `shared_host` a machine
  that both use), `timing` (its result), `bounds` (the least time of an epoch)
- `simulated_training` (a whole training, for its times alone), `simulated_round` (one round of it), `forward_phase`
  (the first half of an iteration in one step), `simulated_party` (a device between rounds)
- `search` (the search for the best plans), `search_settings`, `plan_evaluator` (simulates plans and remembers the
  results), `device_groups` (fleets of many kinds), `exhaustive` (all plans)
- `uncut_plans` (plans without a pipeline), `measured_epochs` (what plans really took), `compute_load` (how long
  machines compute), `calibration` (costs that agree with past epochs), `learned_costs` (the next epoch), `replanner`
  (when to plan again), `background_search` (searching while a training runs), `search_worker` (the process that does)

Nothing here imports torch.
"""
