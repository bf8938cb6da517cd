"""Where a network can be cut in two, and cutting it there.

Reading order: `split` (cutting an `nn.Sequential` after layer P, and joining the two states), `stage_line` (any network
as a line of stages that can be cut like one), `exporting` (the operations that torch.export records), `recorded_graph`
(questions about them), `traced` (each place between them where a cut is possible), `consecutive_modules` and
`named_cuts` (cuts after modules that the user names), `sequence` (an `nn.Sequential` whose children cannot all be told
apart), `cut_check` (a cut network compared with the whole one), `dtype_change` (its stages in another dtype),
`forward_effects` (what a forward depends on besides its sample), `custom_backward` (what a recording would lose),
`cut_points` (the cuts as data) and `listing` (making that list), `graph_data` and `saved_stages` (stages as plain data
on disk), `frozen` (parameters that are not trained), `constant_activations` (layers whose activations are the same in
every epoch), `placing` (a network on an accelerator).
"""
