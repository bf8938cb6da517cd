"""Listing the cuts of a network: of layers that run one after another, or of recorded operations."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import fx, nn

from pipar.cutting.cut_points import Crossing, Cut, CutList, NotOffered, Source
from pipar.cutting.traced import CutPoint, TracedNetwork
from pipar.tensors.inputs import Inputs, call, mapped

_MORE_BYTES = "no better than a neighbouring cut, which has about the same work before it and no more bytes"
_DIFFERS = "a step through it differs from that of the uncut network"


def whole_network() -> CutList:
    """Return the list of a network that is not to be cut."""
    return CutList("whole", 1, ())


def layer_cuts(layers: dict[str, nn.Module], example: Inputs, source: Source) -> CutList:
    """Return the cuts after each of these layers but the last, which run one after another; copies of them run."""
    cuts: list[Cut] = []
    value: Any = example
    is_trained = False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for split_point, (name, layer) in enumerate([*layers.items()][:-1], start=1):
            is_trained |= any(weight.requires_grad for weight in layer.parameters())
            value = call(copy.deepcopy(layer).eval(), mapped(value, torch.clone))
            crossing = _crossing(value.shape[1:], value.dtype, has_gradient=is_trained)
            cuts.append(Cut(split_point, name, crossing.size_bytes, (crossing,)))
    return CutList(source, len(layers), tuple(cuts))


def recorded_cuts(
    traced: TracedNetwork,
    points: Sequence[CutPoint],
    chosen: Sequence[CutPoint],
    checked: Sequence[CutPoint],
    work: Sequence[int],
) -> CutList:
    """Return the cuts of recorded operations: `checked` are offered, of `chosen`, of all `points`.

    `work` is that up to each operation.
    """
    works = len({work[point.after] for point in points if point.reason is None})
    thinning = _thinning(sum(point.reason is None for point in points), len(chosen), len(checked), works)
    places = [(_cuts_before(point, checked), _reason(point, chosen, checked), point.module) for point in points]
    return CutList("recorded", len(checked) + 1, cuts_at(traced, checked), tuple(_not_offered(places)), thinning)


def _thinning(usable: int, chosen: int, offered: int, works: int) -> str:
    """Return by which rule usable places were left out; `works` are the different amounts of work before them."""
    sentences = []
    if usable != chosen:
        rule = "of those with the same work before them, the one at which the fewest bytes cross"
        more = f"; of these the {chosen} best by bytes and work" if works > chosen else ""
        verb = "are offered" if offered == chosen else "were checked"
        sentences.append(f"{chosen} of {usable} usable places {verb}: {rule}{more}.")
    if offered != chosen:
        sentences.append(
            f"{chosen - offered} of {chosen} are withdrawn: a step through them differs from that of the uncut network."
        )
    return " ".join(sentences)


def cuts_at(traced: TracedNetwork, points: Iterable[CutPoint]) -> tuple[Cut, ...]:
    """Return what crosses at each of these places."""
    return tuple(
        Cut(number, point.module, point.row_bytes, tuple(_crossing_value(traced, value) for value in point.crossing))
        for number, point in enumerate(points, start=1)
    )


def _crossing_value(traced: TracedNetwork, value: fx.Node) -> Crossing:
    tensor = value.meta["val"]
    return _crossing(tensor.shape[1:], tensor.dtype, has_gradient=value in traced.with_gradient)


def _crossing(shape: Sequence[int], dtype: torch.dtype, *, has_gradient: bool) -> Crossing:
    sides = tuple(map(int, shape))
    is_trained = has_gradient and dtype.is_floating_point
    return Crossing(sides, str(dtype).removeprefix("torch."), prod(sides) * dtype.itemsize, is_trained)


def _cuts_before(point: CutPoint, checked: Sequence[CutPoint]) -> int:
    return sum(cut.after <= point.after for cut in checked)


def _reason(point: CutPoint, chosen: Sequence[CutPoint], checked: Sequence[CutPoint]) -> str | None:
    """Return why a place is not offered; None if it is."""
    if any(point.after == cut.after for cut in checked):
        return None
    if point.reason is not None:
        return point.reason
    return _DIFFERS if any(point.after == cut.after for cut in chosen) else _MORE_BYTES


def _not_offered(places: Iterable[tuple[int, str | None, str]]) -> Iterable[NotOffered]:
    for (split_point, reason), group in groupby(places, key=lambda place: place[:2]):
        modules = [module for *_, module in group]
        if reason is not None:
            yield NotOffered(split_point, modules[0], modules[-1], len(modules), reason, reason == _MORE_BYTES)
