"""Rectified cuts: cuts that follow a ReLU. Their activations have exact zeros, and gradients at zeros are not needed.

Where a ReLU's output is 0, its backward selects 0 for any incoming gradient. So gradients at the zeros of the
output need not be sent to the device: the gradients of its weights stay the same, bit for bit. A max-pool after the
ReLU preserves this: a window whose maximum is 0 passes its gradient to one of the ReLU's zeros, and any other window to
a non-zero value. Reshaping and transposing preserve it too, as they change no value.

No other operation counts, even if its output has zeros. Hard-swish, GELU, SiLU, leaky ReLU, `clamp(min=0)`, norms,
linear layers and sums have a slope at 0. An average of positive values can underflow to 0. Dropout multiplies the
gradient by 0, which gives a signed zero or, for an infinite gradient, NaN.

The operations are read from autograd's graph, because that is what will run: it includes hooks, in-place operations and
functional calls, and a subclass of nn.ReLU with another forward is not mistaken for a ReLU. Two alternatives were
rejected: torch.fx would need no shapes, but while it traces it replaces nn.Module.__call__ in the whole process, which
other threads are using to train; the meta device would need no values, but makes torch import its compiler, which
takes seconds and 80 MB.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from pipar.tensors.inputs import InputForm, Inputs, call, mapped, tensors_of

# contiguous() is a clone. A one-dimensional pool is a two-dimensional one between unsqueeze and squeeze.
_RESHAPING = {
    "AliasBackward0", "CloneBackward0", "PermuteBackward0", "ReshapeAliasBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "SqueezeBackward2", "TBackward0", "TransposeBackward0", "UnsafeViewBackward0",
    "UnsqueezeBackward0", "ViewBackward0",
}  # fmt: skip
_MAX_POOLING = {
    "MaxPool2DWithIndicesBackward0", "MaxPool3DWithIndicesBackward0",
    "AdaptiveMaxPool2DBackward0", "AdaptiveMaxPool3DBackward0",
}  # fmt: skip
#: Attributes of a module that hold its hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def rectified_cuts(model: nn.Sequential, inputs: Sequence[int] | InputForm) -> frozenset[int]:
    """Return each split point P for which layers 1..P end in a ReLU or a max-pool of one, reshaped or not.

    Where several tensors cross, it is enough that one of them does: only that one is then sent without its zeros.

    The search ends at the first layer for which this cannot be known: it has hooks, its forward depends on values, or
    autograd does not record all of it. Copies of the layers run in train mode on two samples; the model and the random
    state stay unchanged.
    """
    floating = (weight for weight in model.parameters() if weight.is_floating_point())
    like = next(floating, torch.empty(0))
    own = {id(weight): weight for weight in model.parameters()}
    found = set()
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        # A clone, because a leaf that requires a gradient cannot be overwritten in place.
        output: Inputs = mapped(InputForm.given(inputs).example(2, like.dtype, like.device), _differentiable)
        for split_point, layer in enumerate(model, start=1):
            recorded = _recorded(layer, output, own)
            if recorded is None:
                break
            output = recorded
            if any(map(is_rectified, tensors_of(recorded))):  # checked now, as the next layer may overwrite it
                found.add(split_point)
    return frozenset(found)


def is_rectified(output: Tensor) -> bool:
    """Return True if autograd's graph shows this tensor to be the output of a ReLU, max-pooled and reshaped or not."""
    if output._backward_hooks:
        return False
    node = output.grad_fn
    while node is not None and (node.name() in _RESHAPING | _MAX_POOLING or _widens(node)):
        node = node.next_functions[0][0]
    return node is not None and _is_relu(node)


def _widens(node: Node) -> bool:
    """Return True for a copy from bfloat16 to float32, which changes no value."""
    if node.name() != "ToCopyBackward0":
        return False
    before = node.next_functions[0][0]
    return before is not None and [_dtype_of(one) for one in (before, node)] == [torch.bfloat16, torch.float32]


def _dtype_of(node: Node) -> torch.dtype:
    """Return the dtype of what an operation gave."""
    found: torch.dtype = node._input_metadata[0].dtype
    return found


def _is_relu(node: Node) -> bool:
    """Return True for a ReLU, and for a ReLU6, which autograd records as a hardtanh with minimum 0."""
    if node.name() == "HardtanhBackward0":
        return bool(getattr(node, "_saved_min_val", None) == 0)
    return node.name() == "ReluBackward0"


def _differentiable(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_().clone() if tensor.is_floating_point() else tensor


def _recorded(layer: nn.Module, inputs: Inputs, own: Mapping[int, Tensor]) -> Inputs | None:
    """Return the output of a copy of the layer in train mode; None if it is not a tensor, or its graph is incomplete.

    A copy, because a forward may change the layer's state. It shares the layer's weights, which may be large.
    """
    if _has_hooks(layer) or isinstance(layer, torch.jit.ScriptModule):
        return None
    watch = _Watch()
    try:
        training = copy.deepcopy(layer, dict[int, Any](own)).train()
        with watch:
            output: object = call(training, inputs)
    except Exception:  # noqa: BLE001 - user code may raise anything; the layer then counts as unknown
        return None
    if watch.found:
        return None
    if isinstance(output, tuple) and getattr(layer, "gives_several", False):
        return output
    return output if isinstance(output, Tensor) else None


class _Watch(TorchFunctionMode):
    """Detects operations that make autograd's graph an incomplete record of a forward.

    They change values or gradients without being recorded, or read values into Python: with other values, the forward
    may take another path.
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
    """Return True if the call turned a tensor's values, not its shape or another property, into Python numbers."""
    is_property = getattr(function, "__name__", "") == "__get__"
    is_numbers = isinstance(result, bool | int | float | complex | list)
    return is_numbers and not is_property and function not in _ABOUT_SHAPES


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(inner, hooks) for inner in module.modules() for hooks in HOOKS)
