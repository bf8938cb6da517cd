"""Tensors that travel: what a network takes, what crosses a cut, and both as bodies of messages.

Reading order: `inputs` (a tensor, a tuple or a dictionary with one row for each sample), `bodies` (tensors and model
states as message bodies, and the errors of lossy encodings), `torch_device` (what torch computes on: where tensors are,
streams, synchronisation, memory), `crossing` (several tensors at a cut), `relu_outputs` (which
cuts follow a ReLU, so that gradients at zeros need not be sent).
"""
