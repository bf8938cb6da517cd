"""The mathematics, in torch.

Reading order: `models` (the networks by name), `blocks`, `vgg`, `resnet`, `mobilenet` (what they consist of),
`split` (cutting a network in two), `parts` (forward, backward and step on each side of the cut), `learner` (the
global model and its replicas), `aggregate` and `aggregators` (the next global model), `snapshot` (all that training
resumes from), `tensors` (tensors as bodies of messages), `rectified` (which cuts follow a ReLU), `runtime` (torch's
threads).
"""
