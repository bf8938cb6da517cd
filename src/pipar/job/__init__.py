"""From a configuration to a training with every choice made.

Reading order: `workload` (the network and the data), `profiles` (what the network costs on each machine), `prepare`
(checks everything and makes the job), `job` (a training with every choice made), `plans` (plans for a job), `explain`
(why these plans), `explanation` (the answer as data), `model_setup` (the models of a job), `warm_up` (before the first
epoch), `leakage_audit` (attacks on the cuts of a job's network).
"""
