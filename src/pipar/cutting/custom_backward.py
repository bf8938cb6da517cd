"""Backward passes that a network writes by itself: recorded operations have the gradients of torch instead."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from pipar.tensors.inputs import Inputs, call, mapped, tensors_of

_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
#: Functions that torch makes for an operator with a registered backward, which a recording has as that operator.
_REGISTERED = "torch._library.autograd"


def custom_backward(network: nn.Module, example: Inputs) -> str | None:
    """Return what changes the gradients of a network, as part of a sentence; None if nothing does.

    That is read from autograd's graph of a forward in train mode. It runs in a copy: buffers and the random state stay
    as they are.
    """
    for path, module in network.named_modules():
        if any(getattr(module, hooks) for hooks in _BACKWARD_HOOKS):
            return f"{path or 'it'} has a backward hook"
    watch = _HookWatch()
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        copied = copy.deepcopy(network).train()
        with watch:
            output = call(copied, mapped(example, Tensor.clone))
    if watch.found:
        return "its forward registers a hook on a gradient"
    functions = _functions(tensors_of(output) if isinstance(output, Tensor | tuple | dict) else ())
    return next((f"{name} has a backward of its own" for name in functions), None)


def hooked_parameter(network: nn.Module) -> str | None:
    """Return the name of a parameter that has a hook on its gradient; None if there is none."""
    hooked = (name for name, one in network.named_parameters() if any(getattr(one, key, 0) for key in _OF_PARAMETERS))
    return next(hooked, None)


class _HookWatch(TorchFunctionMode):
    """Notices that a forward registers a hook on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func is Tensor.register_hook
        return func(*args, **(kwargs or {}))


def _functions(outputs: Iterable[object]) -> Iterator[str]:
    """Yield the names of the user's own torch.autograd.Functions that the outputs were computed with."""
    left = [output.grad_fn for output in outputs if isinstance(output, Tensor)]
    seen: set[Node | None] = {None}
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            kind = node._forward_cls
            if kind.__module__ != _REGISTERED:
                yield kind.__name__
        left += [following for following, _ in node.next_functions]
