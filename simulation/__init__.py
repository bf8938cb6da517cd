"""The programs of a deployment in simulated worlds where everything can fail: `python -m simulation --seeds N`.

In reading order: `scenario` draws what a world trains and which faults happen when; `tiny_training` has its network and
data. `world` runs it: `server` and `device` restart the production programs over `network`, `disk` and `processes`,
each machine with its own of the `clocks`. `faults` breaks them, and `environment` is what they share. Attackers are
`tampering` (a member whose link changes what it says), `intruder` (a peer that only attacks) and `imposter` (a program
at the server's address). `invariants` says what must be true and `checks` when it is checked; `draws` counts how often
each device was drawn and `ledgers` privacy budgets, `reference_training` computes the expected model, `memory_bounds`
the memory that a plan needs, `instrumented` has a learner that counts samples, and `resources` samples this process's
memory and open files. `campaign` simulates many seeds; `command` and `__main__` are the command line.
"""
