"""Adapters of low rank (LoRA; Hu et al. 2021): whether a network trains any."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import permutations

from torch import nn

Shape = tuple[int, ...]
#: Parameters of adapters that peft has made have this in their names.
_NAME = "lora_"


def uses_adapters(model: nn.Module) -> bool:
    """Return whether a part of the network trains only factors B A of updates to frozen matrices W.

    These are two trained matrices whose product has the shape of a frozen matrix of the same module, and a lower rank.
    """
    named = [(name, tuple(weight.shape), weight.requires_grad) for name, weight in model.named_parameters()]
    if any(is_trained and _NAME in name for name, _, is_trained in named):
        return True
    parts: dict[str, tuple[set[Shape], set[Shape]]] = {}  # by module: shapes of frozen and of trained parameters
    for name, shape, is_trained in named:
        for module in _modules(name):
            parts.setdefault(module, (set(), set()))[is_trained].add(shape)
    return any(_are_factors(trained, frozen) for frozen, trained in parts.values() if frozen and trained)


def _modules(name: str) -> Iterator[str]:
    """Yield the path of each module that contains a parameter."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
    yield ""


def _are_factors(trained: Iterable[Shape], frozen: Iterable[Shape]) -> bool:
    """Return whether every trained parameter is a factor of the update of some frozen matrix."""
    if any(len(shape) != 2 for shape in trained):
        return False
    # Some layers keep their matrix transposed.
    matrices = {one for shape in frozen if len(shape) == 2 for one in (shape, shape[::-1])}
    factors: set[Shape] = set()
    for (rows, rank), (same, columns) in permutations(trained, 2):
        if rank == same and rank < min(rows, columns) and (rows, columns) in matrices:
            factors |= {(rows, rank), (same, columns)}
    return factors == set(trained)
