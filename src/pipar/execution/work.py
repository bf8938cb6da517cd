"""Pieces of work that lanes run, and the micro-batch that each belongs to."""

from __future__ import annotations

from dataclasses import dataclass

#: Identifies a micro-batch: epoch, iteration, its number, and more where that is not unique.
Place = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work on a lane: the name of its span, and everything that its cost can depend on.

    Besides the compute stages there are load, noise (on inputs), encode, decode, step (optimiser), protect (clip an
    update and add noise), pack (a model into bytes), install (bytes into a model), aggregate and validate.
    """

    kind: str
    epoch: int = 0
    iteration: int = 0
    micro_batch: int = 0
    first_layer: int = 1
    last_layer: int = 0
    samples: int = 0
    size_bytes: int = 0  # before encoding, or after decoding
    device: str = ""
    encoding: str = "raw"  # of encode and decode
    chunks: int = 1  # decoded, or computed, one after another
