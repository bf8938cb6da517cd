"""The mathematics of training, in torch: both sides of the cut, and the global model.

Reading order: `micro_batches` (cutting a batch), `parts` (the layers on one side of the cut, and their optimiser step),
`loss_sum` (the losses of micro-batches), `device_part` and `server_part` (forward, backward and messages of each side),
`at_once` (several micro-batches at the same time), `shared_part` (a server-side model that all devices share),
`optimizers` (steps, and state by name) with `eager_optimizers` (torch's, without its compiler), `learner` (the global
model and its replicas), `kept_activations` (what devices need not send again), `adapters` (factors of low rank),
`start_weights` (the file that a training starts from), `snapshot` (what training resumes from), `runtime` (torch's
threads and memory).
"""
