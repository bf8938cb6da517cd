"""The mathematics, in torch.

Reading order: `models` (the networks by name), `blocks`, `vgg`, `resnet`, `mobilenet` (their building blocks), `split`
(cutting a network in two), `parts` (cutting a batch into micro-batches; forward, backward and step on each side of the
cut), `shared_part` (a server-side model that all devices share), `learner` (the global model and its replicas),
`averaging` (the weighted mean of models), `aggregators`, `robust_aggregators` and `named_aggregators` (the next global
model), `snapshot` (what training resumes from), `tensors` (tensors as message bodies, and the errors of lossy
encodings), `rectified` (which cuts follow a ReLU), `runtime` (torch's threads and memory).
"""
