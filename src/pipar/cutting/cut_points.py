"""Where a network can be cut, as data: what crosses each cut, and why other places are not offered. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

#: The children of an nn.Sequential, modules that the user named, the operations that torch.export recorded, or no cut.
Source = Literal["children", "named", "recorded", "whole"]


@dataclass(frozen=True)
class Crossing:
    """A tensor that crosses a cut: its shape for one sample, its dtype and bytes, and whether its gradient returns."""

    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    has_gradient: bool

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'one'} {self.dtype}"


@dataclass(frozen=True)
class Cut:
    """A cut that is offered: after a module, or after an operation that follows it."""

    split_point: int
    after: str
    size_bytes: int  # of one sample
    crossing: tuple[Crossing, ...] = ()  # empty: only their bytes are known


@dataclass(frozen=True)
class NotOffered:
    """Neighbouring places between two cuts that are not offered, with their common reason."""

    split_point: int  # of the cut before them; 0 before the first
    first: str
    last: str
    places: int
    reason: str
    is_thinned: bool = False  # it could be used


@dataclass(frozen=True)
class CutList:
    """The cuts of a network in order of execution; with P = Q, after all layers, nothing is cut."""

    source: Source
    layers: int  # Q
    cuts: tuple[Cut, ...]
    not_offered: tuple[NotOffered, ...] = ()
    thinning: str = ""  # how cuts were thinned; empty if none was left out for that

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `from_dict` reads back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> CutList:
        """Return the cuts of plain data; raise KeyError, TypeError or ValueError if they are of another form."""
        cuts = tuple(
            Cut(
                int(one["split_point"]),
                str(one["after"]),
                int(one["size_bytes"]),
                tuple(Crossing(tuple(each["shape"]), **_without(each, "shape")) for each in one["crossing"]),
            )
            for one in tree["cuts"]
        )
        places = tuple(NotOffered(**one) for one in tree["not_offered"])
        return cls(tree["source"], int(tree["layers"]), cuts, places, str(tree["thinning"]))


def _without(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name != key}
