"""The classes of torch.optim without their hooks for torch.compile.

These hooks import the compiler, torch._dynamo, when the first optimiser is made: more than a second in every program,
also in those that never compile anything. They act only while torch.compile traces an optimiser, which pipar never
does, so steps are the same with and without them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_HOOKED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


@cache
def eager(kind: Any) -> Callable[..., torch.optim.Optimizer]:
    """Return a subclass of an optimiser of torch, with the methods below their hooks for torch.compile.

    Hooks of users and of torch's profiler around a step are kept.
    """
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in _HOOKED}
    step = torch.no_grad()(inspect.unwrap(kind.step))
    made: Callable[..., torch.optim.Optimizer] = type(kind.__name__, (kind,), {**methods, "step": step})
    return made
