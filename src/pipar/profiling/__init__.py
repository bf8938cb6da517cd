"""What a network costs on a machine.

Reading order:

- `profile`: the record, with times, sizes and memory of each layer; `comparison` (whether it is of a network)
- `measure`: measures a profile on this machine; `measurement_task` (what to measure), `layer_times`, `overheads` (the
  work around the layers), `coding_costs` (encodings), `contention` (all cores at the same time), `several_threads`
  (that compute one stage), `machine_load` (other programs), `repeated_timing` (its clock)
- `cache`: measured profiles on disk
- `machines`: profiles of machines known by name, from `operation_counts` (operations and bytes of each layer), which
  `operation_counter` counts
- `memory`: what a plan needs

`cache`, `comparison`, `machines`, `memory`, `operation_counts`, `profile` and `repeated_timing` do not import torch.
"""
