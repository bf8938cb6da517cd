"""Which cuts lie behind a ReLU: what crosses them has exact zeros, and no weight sees the gradient at a zero.

Where a ReLU gives 0 its backward selects 0, whatever gradient comes. So gradients at the zeros of the output need not
be sent to the device, and the gradients of its weights stay the same, bit for bit. A max-pool behind the ReLU keeps
this: a window whose largest value is 0 hands its gradient to one of the ReLU's zeros, any other window to another
place. So do reshaping and transposing, which change no value.

Nothing else counts, although it may give zeros, too: at 0 hard-swish, GELU, SiLU, leaky ReLU, `clamp(min=0)`, norms,
linear layers and sums have a slope; an average of values above 0 can underflow to 0; dropout multiplies the gradient
by 0, and what comes out has a sign or, of an infinite gradient, is not a number.

What a network does is read off autograd's own graph, which is what will run: hooks, in-place operations and
functional calls are in it, and a subclass of nn.ReLU cannot pretend. Symbolic tracing by torch.fx would need no shapes,
but replaces nn.Module.__call__ in the whole process while it traces, under the feet of threads that train; the meta
device would need no numbers, but makes torch import its compiler, seconds and 80 MB.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

# A clone is what contiguous() makes. One-dimensional pools are two-dimensional ones between unsqueeze and squeeze.
_RESHAPING = {
    "AliasBackward0", "CloneBackward0", "PermuteBackward0", "ReshapeAliasBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "SqueezeBackward2", "TBackward0", "TransposeBackward0", "UnsafeViewBackward0",
    "UnsqueezeBackward0", "ViewBackward0",
}  # fmt: skip
_MAX_POOLING = {
    "MaxPool2DWithIndicesBackward0", "MaxPool3DWithIndicesBackward0",
    "AdaptiveMaxPool2DBackward0", "AdaptiveMaxPool3DBackward0",
}  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def rectified_cuts(model: nn.Sequential, input_shape: tuple[int, ...]) -> frozenset[int]:
    """Return every split point P for which layers 1..P end in a ReLU, up to a layer of which this cannot be known.

    Copies of the layers run on two samples of zeros in train mode; the model and the random numbers stay as they are.
    """
    floating = (weight for weight in model.parameters() if weight.is_floating_point())
    like = next(floating, torch.empty(0))
    own = {id(weight): weight for weight in model.parameters()}
    found = set()
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        # A clone, because a leaf that needs a gradient cannot be overwritten in place.
        output = like.new_zeros((2, *input_shape)).requires_grad_().clone()
        for split_point, layer in enumerate(model, start=1):
            recorded = _recorded(layer, output, own)
            if recorded is None:
                break
            output = recorded
            if is_rectified(output):  # now: the next layer may overwrite it
                found.add(split_point)
    return frozenset(found)


def is_rectified(output: Tensor) -> bool:
    """Return True if this very tensor came out of a ReLU by what changes no value: read off the graph behind it."""
    if output._backward_hooks:
        return False
    node = output.grad_fn
    while node is not None and node.name() in _RESHAPING | _MAX_POOLING:
        node = node.next_functions[0][0]
    return node is not None and _is_relu(node)


def _is_relu(node: Node) -> bool:
    """Return True for a ReLU, and for a ReLU6, which autograd knows as a hardtanh from 0 on."""
    if node.name() == "HardtanhBackward0":
        return bool(getattr(node, "_saved_min_val", None) == 0)
    return node.name() == "ReluBackward0"


def _recorded(layer: nn.Module, inputs: Tensor, own: Mapping[int, Tensor]) -> Tensor | None:
    """Return what a copy of the layer gives in training; None if it is no tensor, or its graph not the whole truth.

    A copy, because a forward may keep or count what it was given; its weights, which may be large, are its own.
    """
    if _has_hooks(layer) or isinstance(layer, torch.jit.ScriptModule):
        return None
    watch = _Watch()
    try:
        training = copy.deepcopy(layer, dict[int, Any](own)).train()
        with watch:
            output: object = training(inputs)
    except Exception:  # noqa: BLE001 - a user's code may raise anything, and then nothing is known of it
        return None
    return output if isinstance(output, Tensor) and not watch.found else None


class _Watch(TorchFunctionMode):
    """Finds what makes autograd's graph less than the truth about a forward.

    That is what changes values or gradients unseen by it, and a look at the numbers: with others, the forward may take
    another way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= func in _UNSEEN or not torch.is_grad_enabled() or _shows_numbers(func, result)
        return result


_UNSEEN = (Tensor.register_hook, Tensor.detach, Tensor.detach_, Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
_ABOUT_SHAPES = (
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.stride,
    Tensor.is_contiguous, Tensor.is_floating_point,
)  # fmt: skip


def _shows_numbers(function: Any, result: object) -> bool:
    """Return True if a tensor's values came out as numbers of Python, and not its shape or another property."""
    is_property = getattr(function, "__name__", "") == "__get__"
    is_numbers = isinstance(result, bool | int | float | complex | list)
    return is_numbers and not is_property and function not in _ABOUT_SHAPES


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(inner, hooks) for inner in module.modules() for hooks in _HOOKS)
