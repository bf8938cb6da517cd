"""Counts what a network does, layer by layer; the records are in `operation_counts`.

Every operator of two training passes is recorded, forward and backward, and so is every tensor that autograd keeps. The
passes can run on torch's meta device, where tensors have shapes but no content and a batch of any size costs nothing.
"""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipar.cutting.cut_check import dtype_of
from pipar.cutting.split import named_layers
from pipar.cutting.stage_line import Line
from pipar.profiling.operation_counts import CountedTensor, Counts, LayerCount, PassCount
from pipar.tasks.task import Task, classification
from pipar.tensors.inputs import InputForm, Inputs, call, tensors_of, with_gradient

#: Two batches show what grows with the samples and what does not. Large ones are exact about the peak of memory: with
#: few samples, the peak is sometimes where a large gradient of weights is allocated; with many, it never is.
_LARGE = (1 << 16, 1 << 17)
_SMALL = (2, 4)

_COPIES_NOTHING = {"_unsafe_view", "_reshape_alias", "detach", "empty_like", "empty"}


_LABELS = classification(0)


def count_layers(
    model: nn.Sequential, inputs: Sequence[int] | InputForm, *, run: bool = False, task: Task = _LABELS
) -> Counts:
    """Return the counts of every layer in train mode; the last one includes the loss.

    The model is not changed. Sizes are those of float32, for any dtype of the model. With `run` the network really
    runs on a few samples: the meta device makes torch import its compiler, 80 MB and seconds on a small board. If one
    way fails, because memory is short or a layer inspects its values, the other one is tried.
    """
    first, second = (_run_on_few, _run_hollow) if run else (_run_hollow, _run_on_few)
    with contextlib.suppress(NotImplementedError, RuntimeError, MemoryError):
        return first(model, InputForm.given(inputs), task)
    # Here the error is freed, and with it everything that the first way has allocated.
    return second(model, InputForm.given(inputs), task)


def _run_on_few(model: nn.Sequential, form: InputForm, task: Task) -> Counts:
    return _count(copy.deepcopy(model), form, _SMALL, task)


def _run_hollow(model: nn.Sequential, form: InputForm, task: Task) -> Counts:
    return _count(_hollow(model), form, _LARGE, task)


def _hollow(model: nn.Sequential) -> nn.Sequential:
    """Return a copy on the meta device; the weights themselves are never copied."""
    tensors: dict[int, Any] = {
        id(old): nn.Parameter(torch.empty_like(old, device="meta"), requires_grad=old.requires_grad)
        for old in model.parameters()
    }
    tensors |= {id(old): torch.empty_like(old, device="meta") for old in model.buffers()}
    return copy.deepcopy(model, tensors)


def _count(model: nn.Sequential, form: InputForm, sizes: tuple[int, int], task: Task) -> Counts:
    # Recorded operations may fix the dtype of a network.
    dtype = dtype_of(model) if isinstance(model, Line) else torch.float32
    model = model.to(dtype).train()
    with torch.random.fork_rng(devices=[]):
        few, many = (_seen(model, form, size, dtype, task) for size in sizes)
    layers = named_layers(model).items()
    return tuple(_layer_count(name, layer, a, b, sizes) for (name, layer), a, b in zip(layers, few, many, strict=True))


def _layer_count(name: str, layer: nn.Module, few: _LayerSeen, many: _LayerSeen, sizes: tuple[int, int]) -> LayerCount:
    state = [*layer.parameters(), *layer.buffers()]
    floating, other = _split(state)

    def each(a: int, b: int) -> int:
        """Return what one more sample adds."""
        return max(0, math.ceil((b - a) / (sizes[1] - sizes[0])))

    outputs = [
        CountedTensor(each(a.elements, b.elements), a.other_bytes, a.has_gradient)
        for a, b in zip(few.outputs, many.outputs, strict=True)
    ]
    return LayerCount(
        name,
        outputs=sum(one.elements for one in outputs if not one.other_bytes),
        tensors=tuple(outputs) if len(outputs) > 1 else (),
        parameters=floating,
        other_parameter_bytes=other,
        saved=each(few.saved, many.saved),
        other_saved_bytes=each(few.other_saved_bytes, many.other_saved_bytes),
        working=max(
            math.ceil(each(few.working(way), many.working(way)) / few.item_bytes) for way in ("forward", "backward")
        ),
        forward=_pass_count(few.forward, many.forward, sizes),
        backward=_pass_count(few.backward, many.backward, sizes),
        frozen=_split(weight for weight in layer.parameters() if not weight.requires_grad)[0],
        trained=any(weight.requires_grad for weight in layer.parameters()),
    )


def _pass_count(few: _Region, many: _Region, sizes: tuple[int, int]) -> PassCount:
    between = sizes[1] - sizes[0]
    elements_of_all = (many.elements + many.matrix_elements - few.elements - few.matrix_elements) / between
    return PassCount(
        dense=round((many.dense - few.dense) / between),
        grouped=round((many.grouped - few.grouped) / between),
        elements=round((many.elements - few.elements) / between),
        fixed_elements=max(0, round(few.elements + few.matrix_elements - elements_of_all * sizes[0])),
        calls=few.calls,
    )


def _split(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """Return the elements of the floating tensors, and the bytes of the others."""
    floating = other = 0
    for tensor in tensors:
        if tensor.is_floating_point():
            floating += tensor.numel()
        else:
            other += tensor.numel() * tensor.element_size()
    return floating, other


# --- one training pass ----------------------------------------------------------------------------------------


@dataclass
class _Region:
    """What happened in one direction through one layer."""

    dense: int = 0
    grouped: int = 0
    elements: int = 0
    matrix_elements: int = 0  # of operands and results of multiplications: only those of weights count (_pass_count)
    calls: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True)
class _Output:
    """A tensor after a layer: its elements, the bytes of one if it is in no floating-point dtype, and its gradient."""

    elements: int
    other_bytes: int
    has_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Output:
        other_bytes = 0 if tensor.is_floating_point() else tensor.element_size()
        return cls(tensor.numel(), other_bytes, tensor.requires_grad)


@dataclass
class _LayerSeen:
    """One layer in one pass; `kept_bytes` is everything alive at the end of its forward."""

    forward: _Region = field(default_factory=_Region)
    backward: _Region = field(default_factory=_Region)
    outputs: list[_Output] = field(default_factory=list)
    saved: int = 0
    other_saved_bytes: int = 0
    kept_bytes: int = 0
    item_bytes: int = 4  # of a number of the network

    def working(self, way: str) -> int:
        region: _Region = getattr(self, way)
        return max(0, region.peak_bytes - self.kept_bytes)


def _seen(model: nn.Sequential, form: InputForm, samples: int, dtype: torch.dtype, task: Task) -> list[_LayerSeen]:
    """Return what a training pass over some samples does in each layer."""
    like = next(iter(model.parameters()), torch.empty(0))
    inputs = form.example(samples, dtype, like.device)
    targets = task.example(samples, like.device)
    for parameter in model.parameters():
        # A micro-batch mostly adds to existing gradients.
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    layers = [_LayerSeen(item_bytes=dtype.itemsize) for _ in model]
    weights = [*model.parameters(), *model.buffers(), *_gradients(model)]
    tape = _Tape([*tensors_of(inputs), *tensors_of(targets)], weights, dtype)
    for tensor in tensors_of(inputs):
        tape.keep(layers[0], tensor)
    output: Any = inputs
    del inputs, tensor
    with tape, saved_tensors_hooks(tape.pack, _unpack):
        for seen, layer in zip(layers, model, strict=True):
            tape.enter(seen, seen.forward)
            output = call(layer, output)
            _keep(tape, seen, output)
            if seen is layers[-1]:
                output = task.share(output, targets, samples)
            else:
                _watch(tape, seen, output)
            seen.kept_bytes = tape.alive_bytes
        tape.enter(layers[-1], layers[-1].backward)
        if output.requires_grad:
            torch.autograd.backward(output)
    model.zero_grad(set_to_none=True)
    return layers


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _keep(tape: _Tape, seen: _LayerSeen, output: Inputs) -> None:
    """Note what a layer gives. No reference to it may stay: it would count as alive."""
    seen.outputs = [_Output.of(tensor) for tensor in tensors_of(output)]
    for tensor in tensors_of(output):
        tape.keep(seen, tensor)


def _watch(tape: _Tape, seen: _LayerSeen, output: Inputs) -> None:
    for tensor in with_gradient(output):
        tensor.register_hook(partial(_arrive, tape, seen))  # type: ignore[no-untyped-call]


def _arrive(tape: _Tape, seen: _LayerSeen, _: Tensor) -> None:
    """Note the start of this layer's backward."""
    tape.enter(seen, seen.backward)


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds every operator to the region that was entered last, and counts the bytes that are alive.

    A tensor's memory is its storage, which views share; those of a batch and of the weights do not count as alive.
    """

    def __init__(self, batch: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive_bytes = 0
        self._dtype = dtype
        self._references: dict[int, weakref.ref[Any]] = {}
        self._device = next((tensor.device for tensor in batch), None)
        self._given = [tensor.untyped_storage() for tensor in (*batch, *weights)]
        self._sizes = {id(storage): 0 for storage in self._given}
        # Kept storages count once, and weights do not.
        self._kept = {id(storage) for storage in self._given[len(batch) :]}
        self._layer = _LayerSeen()
        self._region = self._layer.forward

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here. To skip it, torch would import its compiler: 80 MB and more than a second.
        return False

    def enter(self, layer: _LayerSeen, region: _Region) -> None:
        self._layer, self._region = layer, region
        region.peak_bytes = max(region.peak_bytes, self.alive_bytes)

    def keep(self, layer: _LayerSeen, tensor: Tensor) -> None:
        """Count a tensor that is kept until the backward, unless its storage is counted already."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._kept:
            self._kept.add(id(storage))
            if tensor.is_floating_point():
                layer.saved += storage.nbytes() // tensor.element_size()
            else:
                layer.other_saved_bytes += storage.nbytes()

    def pack(self, tensor: Tensor) -> Tensor:
        self.keep(self._layer, tensor)
        return tensor.detach()  # an output that references itself would never be freed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = self._as_counted(kwargs or {})
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _COPIES_NOTHING or _is_view(func):
            return result
        outputs = _tensors(result)
        for tensor in outputs:
            self._allocate(tensor)
        region = self._region
        region.peak_bytes = max(region.peak_bytes, self.alive_bytes)
        region.calls += 1
        elements = sum(tensor.numel() for tensor in [*_tensors((args, kwargs)), *outputs])
        multiply_adds = _multiply_adds(name, args, outputs)
        if multiply_adds is None:
            region.elements += elements
            return result
        region.matrix_elements += elements
        if _groups(name, args) > 1:
            region.grouped += multiply_adds
        else:
            region.dense += multiply_adds
        return result

    def _as_counted(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments with the device and the floating dtype of this count, where they name others.

        A recorded network names those with which it was recorded.
        """
        changes: dict[str, Any] = {}
        if self._device is not None and kwargs.get("device") is not None:
            changes["device"] = self._device
        if kwargs.get("dtype") is torch.float64:
            changes["dtype"] = self._dtype
        return {**kwargs, **changes}

    def _allocate(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._sizes:
            return
        size = storage.nbytes()
        self._sizes[key] = size
        self.alive_bytes += size
        self._references[key] = weakref.ref(storage, lambda _: self._free(key))

    def _free(self, key: int) -> None:
        self.alive_bytes -= self._sizes.pop(key)
        self._kept.discard(key)  # another storage may reuse this id
        del self._references[key]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_view(func: Any) -> bool:
    """Return True if an operator returns a view of its input and touches no element."""
    returned = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _multiply_adds(name: str, args: tuple[Any, ...], outputs: Sequence[Tensor]) -> int | None:
    """Return the multiply-adds of a convolution or a product of matrices; None for any other operator."""
    if name == "convolution":
        inputs, weight, transposed = args[0], args[1], args[6]
        return int((inputs if transposed else outputs[0]).numel() * _each_way(weight))
    if name == "convolution_backward":
        gradient, inputs, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
        return int((inputs if transposed else gradient).numel() * _each_way(weight) * sum(wanted[:2]))
    if name in ("mm", "bmm"):
        return int(args[0].numel() * args[1].shape[-1])
    if name in ("addmm", "baddbmm"):
        return int(args[1].numel() * args[2].shape[-1])
    return None


def _each_way(weight: Tensor) -> int:
    """Return the multiply-adds of one element on the side of the weight's first dimension."""
    return weight[0].numel()


def _groups(name: str, args: tuple[Any, ...]) -> int:
    places = {"convolution": 8, "convolution_backward": 9}
    return int(args[places[name]]) if name in places else 1
