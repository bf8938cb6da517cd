"""Algorithm 1: the device's program.

Reading order: `program` (the algorithm), `pipeline` (what runs in parallel to the compute lane: loading, activations
up, gradients down), `model` (the device-side model and its orders), `evaluation` (the global model on samples of its
own), `intake` (what a device takes from its server), `link_answer` (its link is measured), `interfaces` (what a device
is given).
"""
