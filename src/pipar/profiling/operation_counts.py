"""Counts of what each layer of a network does for one sample: multiply-adds, elements, operator calls, memory.

The records are made by `operation_counter`. The counts of the known networks, for the images of the known datasets, are
in `networks.json`, so that planning for them needs no torch. Next to them are measured numbers: what encodings leave of
activations and gradients (`shares.json`), and what share of a model's bytes a round changes (`changes.json`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any

from pipar.profiling.comparison import NetworkSizes
from pipar.profiling.profile import item_bytes

#: Networks are counted with these two numbers of classes; counts for all others lie on the line between them.
FEW_CLASSES, MANY_CLASSES = 2, 1002
#: By encoding: the share of bytes that it leaves of the activations and of the gradients at a cut.
Shares = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class PassCount:
    """One direction through a layer: multiply-adds and elements of a sample, and the fixed work of a micro-batch.

    `dense` are the multiply-adds of convolutions without groups and of matrices, `grouped` those of convolutions with
    groups; `elements` are read and written by all other operators. `fixed_elements` are read and written once for a
    micro-batch of any size: weights and their gradients. `calls` counts operators.
    """

    dense: int
    grouped: int
    elements: int
    fixed_elements: int
    calls: int


@dataclass(frozen=True)
class CountedTensor:
    """One of several tensors that cross a cut: elements of one sample, and bytes of one if it is not a float."""

    elements: int
    other_bytes: int = 0
    has_gradient: bool = True

    def bytes_both_ways(self, dtype: str) -> tuple[int, int]:
        """Return the bytes of one sample, and those of its gradient."""
        size = self.elements * (self.other_bytes or item_bytes(dtype))
        return size, size if self.has_gradient else 0


@dataclass(frozen=True)
class LayerCount:
    """One layer. `outputs`, `saved` and `working` are elements of one sample, `parameters` elements of weights and
    floating buffers; `other_parameter_bytes` and `other_saved_bytes` do not depend on the dtype (counters, indices).
    """

    name: str
    outputs: int
    parameters: int
    other_parameter_bytes: int
    saved: int
    other_saved_bytes: int
    working: int
    forward: PassCount
    backward: PassCount
    rectified: bool = False  # the network, cut after this layer, ends in a ReLU
    shares: Shares = field(default_factory=dict, hash=False)  # as LayerProfile has them
    frozen: int = 0  # elements of parameters that are not trained
    trained: bool = True  # a parameter is
    tensors: tuple[CountedTensor, ...] = ()  # that cross after this layer, if there are several

    def output_bytes(self, dtype: str) -> int:
        if self.tensors:
            return sum(up for up, _ in self.tensor_bytes(dtype))
        return self.outputs * item_bytes(dtype)

    def tensor_bytes(self, dtype: str) -> tuple[tuple[int, int], ...]:
        """Return the bytes of each tensor that crosses, and of its gradient; empty for a single one."""
        return tuple(one.bytes_both_ways(dtype) for one in self.tensors)

    def parameter_bytes(self, dtype: str) -> int:
        return self.parameters * item_bytes(dtype) + self.other_parameter_bytes

    def frozen_bytes(self, dtype: str) -> int:
        return self.frozen * item_bytes(dtype)

    def saved_bytes(self, dtype: str) -> int:
        return self.saved * item_bytes(dtype) + self.other_saved_bytes

    def working_bytes(self, dtype: str) -> int:
        return self.working * item_bytes(dtype)


Counts = tuple[LayerCount, ...]


def rectified_at(counts: Counts, split_points: Collection[int]) -> Counts:
    """Return the counts of a network that ends in a ReLU if it is cut after these layers, counted from 1."""
    return tuple(replace(layer, rectified=p in split_points) for p, layer in enumerate(counts, start=1))


def with_shares(counts: Counts, at_cuts: Sequence[Shares]) -> Counts:
    """Return the counts with what encodings leave after each of the first layers."""
    known = (replace(layer, shares=shares) for layer, shares in zip(counts, at_cuts, strict=False))
    return (*known, *counts[len(at_cuts) :])


def network_sizes(counts: Counts, model: str, dtype: str) -> NetworkSizes:
    """Return the sizes that a profile of this network must have."""
    return NetworkSizes(
        model,
        dtype,
        names=tuple(layer.name for layer in counts),
        output_bytes=tuple(layer.output_bytes(dtype) for layer in counts),
        parameter_bytes=tuple(layer.parameter_bytes(dtype) for layer in counts),
    )


# --- the known networks


def counts_key(model: str, norm: str, input_shape: Sequence[int]) -> str:
    """Return the name of a network's counts in the file: "vgg5 group 3x32x32"."""
    return f"{model} {norm} {'x'.join(map(str, input_shape))}"


def shares_key(model: str, norm: str) -> str:
    """Return the key of a network's shares in their file: the same for images of all shapes."""
    return f"{model} {norm}"


def known_counts(model: str, norm: str, input_shape: Sequence[int], classes: int) -> Counts | None:
    """Return the counts of a known network; None if they are not kept for images of this shape."""
    entry = _file("networks.json").get(counts_key(model, norm, input_shape))
    if entry is None:
        return None
    return with_shares(_read(entry, classes), known_shares(model, norm))


def known_shares(model: str, norm: str) -> list[Shares]:
    """Return what encodings leave at each cut of a known network, for images of any shape; empty for any other."""
    cuts = _file("shares.json").get(shares_key(model, norm), [])
    return [{name: (up, down) for name, (up, down) in cut.items()} for cut in cuts]


def known_changes_share(model: str, norm: str, dtype: str) -> float:
    """Return the share of a known network's bytes that a round's changes have; 1 for any other network."""
    shares: Mapping[str, float] = _file("changes.json").get(shares_key(model, norm), {})
    return shares.get(dtype, 1.0)


def pack_counts(few: Counts, many: Counts) -> dict[str, list[Any]]:
    """Return the file's entry for a network that was counted with few and with many classes.

    Only the last layer differs. All of its counts are linear in the number of classes, except `working`, the larger of
    two linear ones: the line between the two counts is nowhere below it.
    """
    assert few[:-1] == many[:-1], "a layer before the last one depends on the number of classes"
    last, more = _row(few[-1]), _row(many[-1])
    slope = [(b - a) / (MANY_CLASSES - FEW_CLASSES) for a, b in zip(last[1:], more[1:], strict=True)]
    return {
        "layers": [_row(layer) for layer in few],
        "per_class": [_short(each) for each in slope],
        "rectified": [p for p, layer in enumerate(few, start=1) if layer.rectified],
    }


def _read(entry: Mapping[str, list[Any]], classes: int) -> Counts:
    *layers, last = entry["layers"]
    numbers = [round(n + each * (classes - FEW_CLASSES)) for n, each in zip(last[1:], entry["per_class"], strict=True)]
    return rectified_at((*map(_layer, layers), _layer([last[0], *numbers])), entry["rectified"])


_SIZES = ("name", "outputs", "parameters", "other_parameter_bytes", "saved", "other_saved_bytes", "working")


def _row(layer: LayerCount) -> list[Any]:
    """Return name, sizes, forward and backward as one flat list."""
    sizes = [getattr(layer, name) for name in _SIZES]
    return [*sizes, *_numbers(layer.forward), *_numbers(layer.backward)]


def _numbers(count: PassCount) -> Iterator[int]:
    return (getattr(count, one.name) for one in fields(count))


def _layer(row: Sequence[Any]) -> LayerCount:
    name, outputs, parameters, other_parameters, saved, other_saved, working = row[:-10]
    sizes = (outputs, parameters, other_parameters, saved, other_saved, working)
    return LayerCount(name, *sizes, PassCount(*row[-10:-5]), PassCount(*row[-5:]))


def _short(number: float) -> int | float:
    return int(number) if number == int(number) else number


@cache
def _file(name: str) -> dict[str, Any]:
    text = resources.files("pipar.profiling").joinpath(name).read_text("utf-8")
    tree: dict[str, Any] = json.loads(text)
    return tree
