"""The mathematics, in torch.

Reading order: `models` (the networks by name), `blocks`, `vgg`, `resnet`, `mobilenet` (their building blocks), `split`
(cutting a network in two), `frozen` (parameters that are not trained), `adapters` (factors of low rank), `steady`
(layers whose activations are the same in every epoch), `traced`, `line` and `cut_check` (cutting a network that is no
`nn.Sequential`, and checking it), `own_backward` (what a recording of it would lose), `chain` and `named_cuts` (cutting
it after modules that the user names), `cut_list` and `cut_listing` (where it can be cut), `graph_data` and `kept_line`
(its stages as plain data), `inputs` (what a network takes), `losses` and `tasks` (what is learned, and the targets that
travel), `crossing` (several tensors at a cut), `optimizers` (steps, and state by name), `parts` (cutting a batch into
micro-batches; forward, backward and step on each side of the cut), `shared_part` (a server-side model that all devices
share), `learner` (the global model and its replicas), `evaluation` and `metrics` (its scores), `kept_activations` (what
devices need not send again), `start_weights` (the file that a training starts from), `averaging` (the weighted mean of
models), `aggregators`, `robust_aggregators` and `named_aggregators` (the next global model), `snapshot` (what training
resumes from), `tensors` (tensors as message bodies, and the errors of lossy encodings), `rectified` (which cuts follow
a ReLU), `runtime` (torch's threads and memory).
"""
