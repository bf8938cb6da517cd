"""The programs of a deployment in simulated worlds where everything can fail: `python -m simulation --seeds N`.

In reading order: `scenario` draws what a world trains and which faults happen when; `tiny_training` has its network and
data. `world` runs it: `server` and `device` restart the production programs over `network`, `disk` and `processes`,
`faults` breaks them, and `environment` is what they share. `invariants` says what must be true and `checks` when it is
checked; `reference_training` computes the expected model, `memory_bounds` the memory that a plan needs, and
`instrumented` has a learner that counts samples. `campaign` simulates many seeds; `command` and `__main__` are the
command line.
"""
