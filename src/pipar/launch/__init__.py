"""Starting the programs.

Reading order: `assemble` (the two programs with all their parts), `virtual` (both in virtual time, in one process),
`sizes_only` (what a timing-only run trains: sizes without content), `simulated` (a timing-only run without the
programs), `rehearsal` (timing plans by a run of the programs),
`replay_parts` and `replay` (a recorded training in virtual time), `child_processes` (starting and ending processes on
this machine) with `preloaded` (what they import) and `uncollected` (importing faster), `processes` (a training in such
processes), `callbacks` (functions of the caller), `run` (a whole training on this machine), `deployed_server` and
`deployed_device` (a training across machines), `deployed_job` (what the server knows before devices join),
`deployed_process` (what both programs share), `device_lanes` (threads of a device), `final_model` (which model is
saved), `worker_pool` (many independent computations at once).
"""
