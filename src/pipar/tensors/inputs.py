"""What a network takes: a tensor, a tuple or a dictionary of tensors, each with one row for each sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

#: A batch, as the network is called with it; what crosses a cut is a tensor or a tuple.
Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def call(module: nn.Module, inputs: Inputs) -> Any:
    """Return module(x) for a tensor, module(*x) for a tuple, module(**x) for a dictionary."""
    if isinstance(inputs, Tensor):
        return module(inputs)
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


def tensors_of(inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the tensors, those of a dictionary in its order."""
    if isinstance(inputs, Tensor):
        return (inputs,)
    return tuple(inputs.values()) if isinstance(inputs, dict) else inputs


def with_gradient(inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the tensors that have a gradient."""
    return tuple(tensor for tensor in tensors_of(inputs) if tensor.requires_grad)


def as_rows(inputs: Inputs) -> Tensor:
    """Return one tensor: itself or, of several, all values of a sample side by side."""
    if isinstance(inputs, Tensor):
        return inputs
    tensors = tensors_of(inputs)
    dtype = next(tensor.dtype for tensor in tensors if tensor.is_floating_point())
    return torch.cat([tensor.reshape(len(tensor), -1).to(dtype) for tensor in tensors], dim=1)


def rebuilt(like: Inputs, tensors: Iterable[Tensor]) -> Inputs:
    """Return these tensors in the structure of other inputs."""
    if isinstance(like, Tensor):
        (tensor,) = tensors
        return tensor
    return dict(zip(like, tensors, strict=True)) if isinstance(like, dict) else tuple(tensors)


def mapped(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Return the inputs with each tensor changed."""
    return rebuilt(inputs, map(change, tensors_of(inputs)))


def split_rows(inputs: Inputs, sizes: list[int]) -> list[Inputs]:
    """Return the inputs cut into pieces of these numbers of samples, as views."""
    pieces = zip(*(torch.split(tensor, sizes) for tensor in tensors_of(inputs)), strict=True)
    return [rebuilt(inputs, piece) for piece in pieces]


def in_dtype(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Return the inputs with floating-point tensors in this dtype, and all others as they are."""
    return mapped(inputs, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def drawn_like(example: Inputs, count: int, seed: int) -> Any:
    """Return random inputs in float64; integers are between the smallest and the largest of the example.

    The first integer of each sample is the largest: a mask that hides a whole sample makes many networks return NaN.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: Tensor) -> Tensor:
        shape = (count, *tensor.shape[1:])
        if tensor.is_floating_point():
            return torch.rand(shape, dtype=torch.float64, generator=generator)
        low, high = int(tensor.min()), int(tensor.max())
        values = torch.randint(low, high + 1, shape, generator=generator).to(tensor.dtype)
        values.view(count, -1)[:, 0] = high
        return values

    return mapped(example, drawn)


@dataclass(frozen=True)
class TensorForm:
    """One tensor of a sample: its shape, and its dtype if it is not a floating-point tensor in the network's own."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    low: int = field(default=0, compare=False)  # of integers
    high: int = field(default=0, compare=False)

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """Return the form of a tensor with a row for each sample; uint8 are pixels, which are normalised to floats."""
        shape = tuple(tensor.shape[1:])
        if tensor.is_floating_point() or tensor.dtype == torch.uint8:
            return cls(shape)
        return cls(shape, tensor.dtype, int(tensor.min()), int(tensor.max()))

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "1"
        return size if self.dtype is None else f"{size} ({str(self.dtype).removeprefix('torch.')})"

    def example(self, count: int, dtype: torch.dtype, device: torch.device | None) -> Tensor:
        """Return a batch: zeros, or integers of which one is the least and all others are the largest."""
        made = torch.full((count, *self.shape), self.high, dtype=self.dtype or dtype, device=device)
        made.view(-1)[-1:] = self.low
        return made

    def random(self, count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        shape = (count, *self.shape)
        if self.dtype is None:
            return torch.randn(shape, generator=generator, dtype=dtype)
        return torch.randint(self.low, self.high + 1, shape, generator=generator).to(self.dtype)


@dataclass(frozen=True)
class InputForm:
    """What one sample is: its tensors, and how they are given to the network."""

    tensors: tuple[TensorForm, ...]
    names: tuple[str, ...] | None = None  # of a dictionary
    is_tuple: bool = False

    @classmethod
    def given(cls, form: Sequence[int] | InputForm) -> InputForm:
        """Return a form; a shape is that of one tensor in the network's dtype."""
        return form if isinstance(form, InputForm) else cls((TensorForm(tuple(form)),))

    @classmethod
    def of(cls, inputs: Inputs) -> InputForm:
        """Return the form of the samples of a batch."""
        forms = tuple(map(TensorForm.of, tensors_of(inputs)))
        return cls(forms, tuple(inputs) if isinstance(inputs, dict) else None, isinstance(inputs, tuple))

    @property
    def is_floats(self) -> bool:
        """True for one tensor of floating-point numbers, as images are."""
        return self.names is None and not self.is_tuple and self.tensors[0].dtype is None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample; if it is not a single tensor, the number of its values."""
        if self.names is None and not self.is_tuple:
            return self.tensors[0].shape
        return (sum(math.prod(form.shape) for form in self.tensors),)

    def __str__(self) -> str:
        if self.names is not None:
            return ", ".join(f"{name} {form}" for name, form in zip(self.names, self.tensors, strict=True))
        return f"({', '.join(map(str, self.tensors))})" if self.is_tuple else str(self.tensors[0])

    @property
    def ranges(self) -> str:
        """The lowest and highest value of each tensor of integers, as text; empty without one."""
        names = self.names or [f"tensor {number}" for number in range(1, len(self.tensors) + 1)]
        named = [
            (name if len(self.tensors) > 1 else "the samples", one)
            for name, one in zip(names, self.tensors, strict=True)
        ]
        return ", ".join(f"{name} (from {one.low} to {one.high})" for name, one in named if one.dtype is not None)

    def sample_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one sample."""
        return sum(math.prod(form.shape) * (form.dtype or dtype).itemsize for form in self.tensors)

    def example(self, count: int, dtype: torch.dtype, device: torch.device | None = None) -> Inputs:
        """Return a batch of samples of this form, always the same one."""
        return self.structured([form.example(count, dtype, device) for form in self.tensors])

    def random(self, count: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        """Return a batch of random samples of this form."""
        return self.structured([form.random(count, dtype, generator) for form in self.tensors])

    def joined(self, other: InputForm) -> InputForm:
        """Return the same form with the range of both."""
        ranges = [
            TensorForm(one.shape, one.dtype, min(one.low, two.low), max(one.high, two.high))
            for one, two in zip(self.tensors, other.tensors, strict=True)
        ]
        return InputForm(tuple(ranges), self.names, self.is_tuple)

    def value_beyond(self, other: InputForm) -> int | None:
        """Return an end of the range of integers of samples of this form that is outside of its own range, if any."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        ends = ((end, one) for one, given in pairs if given.dtype is not None for end in (given.low, given.high))
        return next((end for end, one in ends if not one.low <= end <= one.high), None)

    def structured(self, tensors: Sequence[Tensor]) -> Inputs:
        """Return these tensors as the network is called with them."""
        if self.names is not None:
            return dict(zip(self.names, tensors, strict=True))
        return tuple(tensors) if self.is_tuple else tensors[0]
