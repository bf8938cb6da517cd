"""Starting the programs.

Reading order: `assemble` (the two programs with all their parts), `virtual` (in virtual time, one process),
`sizes_only` (timing-only: bodies with a size and no content), `rehearsal` (timing plans by such a run), `processes`
(as processes of this machine), `run` (a whole training in either world), `deployment` (across machines).
"""
