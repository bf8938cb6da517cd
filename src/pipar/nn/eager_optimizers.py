"""The classes of torch.optim without their hooks for torch.compile.

These hooks import the compiler, torch._dynamo, when the first optimiser is made: more than a second in every program,
also in those that never compile anything. They act only while torch.compile traces an optimiser, which pipar never
does, so steps are the same with and without them.
"""

from __future__ import annotations

import inspect
from functools import cache

import torch

_HOOKED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


@cache
def eager(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass with the same name whose methods are those of torch below their hooks for torch.compile.

    Hooks of users and of torch's profiler around a step are kept.
    """
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in _HOOKED}
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), {**methods, "step": step, "__module__": __name__})
