"""The paper's evaluation, run on a virtual testbed: `python -m reproduction NAME`.

In reading order: `experiment` defines cells, experiments and comparisons, and `catalog` lists all experiments.
`published` has the numbers that the paper prints, and `testbed` the machines, fitted to them.

Experiments: `testbed_check`, `efficiency` (times and idle times), `selection`, `plan_map`, `learning`, `variations`
(batch sizes, boards of two speeds), `privacy`, `bandwidth`, `beyond_the_paper`, `scale`.

Running them: `cells` runs one cell, with `plan_scores`, `perturbed_times` and `replanning_cost`; `sweep` runs many, and
`cell_file` keeps their results. `sources` tells which files a result depends on, `requirements` what is not installed,
`durations` how long experiments take.

Presenting them: `tables`, with `reasons` for results outside the paper's range; `plots` chooses among the figures of
`bars`, `curves`, `dots` and `maps`, which share `drawing`. `command` and `__main__` are the command line.
"""
