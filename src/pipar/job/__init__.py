"""From a configuration to a training with every choice made.

Reading order: `passed_object` (an object that the user passed in Python), `passed_module` and `passed_function` (a
module, a function), `user_objects` (all of them), `network_code` (what a network computes, as a key) and `cut_cache`
(its cuts on disk), `user_network` (the user's network, ready to be cut), `held_out` (validation and test sets),
`device_evaluation` (what a device evaluates models on), `declared_form` (the form of samples that the configuration
declares), `samples` (each device's, and the held-out sets), `workload` (the network, its samples and the task),
`profiles` (what the network costs on each machine), `prepare` (checks everything and makes the job), `job` (a training
with every choice made), `equivalence` (whether its weights are exact), `plans` (plans for a job), `explain` (why these
plans), `explanation` (the answer as data), `torch_devices` (what they compute on), `model_setup` (the models of a job),
`warm_up` (before the first epoch), `leakage_audit` (attacks on the cuts of a job's network), `cuts` (where a network
can be cut).
"""
