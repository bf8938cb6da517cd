"""From a configuration to a training with every choice made.

Reading order: `workload` (the network and the data), `prepare` (checks, profiles), `job` (the result of both),
`plans` (plans for a job), `explain` (why a plan was chosen), `torch_setup` (what a training needs of torch),
`leakage_audit` (attacks on the cuts of a job's network).
"""
