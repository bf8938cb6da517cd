"""What a network costs on a machine.

Reading order: `profile` (the record: times, sizes, memory of each layer), `measure` (on this machine),
`coding_costs` and `contention` (what encodings cost; what it costs when all cores compute), `cache` (measured
profiles on disk), `machines` (machines known by name), `operation_counter` and `operation_counts` (operations and
bytes of each layer, counted and as a table), `memory` (what a plan needs). Only `measure`, `coding_costs`,
`contention` and `operation_counter` import torch.
"""
