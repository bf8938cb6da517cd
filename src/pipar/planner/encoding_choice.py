"""The encodings of a device's activations and gradients, chosen for its cut and its link.

Each direction gets the encoding with which a micro-batch takes the least time from one side to the other: encoding,
sending and decoding. Only exact encodings are chosen; a lossy one must be configured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial

from pipar.methods import Plan
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet, Member
from pipar.wire import encodings


def with_encodings(fleet: Fleet, member: Member, plans: Iterable[Plan]) -> list[Plan]:
    """Return a device's plans with the best encodings for its cut and its link; P = Q has nothing to encode."""
    best = cache(partial(_best, fleet, member))  # many N give micro-batches of one size
    largest = cache(lambda micro_batches: fleet.pieces(fleet.batch_size, micro_batches)[0])
    found = []
    for plan in plans:
        p, n = plan.split_point, plan.micro_batches
        up, down = ("raw", "raw") if p == fleet.layers else best(p, largest(n))
        found.append(Plan(p, n, plan.window, up, down))
    return found


def reencoded(fleet: Fleet, plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Return every device's plan with the encodings that are best for the fleet's links, and P and N unchanged."""
    known: dict[tuple[object, ...], Plan] = {}
    again = dict(plans)
    for member in fleet.members:
        plan = plans[member.name]
        key = (member.kind, plan)
        if key not in known:
            (known[key],) = with_encodings(fleet, member, [plan])
        again[member.name] = known[key]
    return again


def _best(fleet: Fleet, member: Member, split_point: int, samples: int) -> tuple[str, str]:
    """Return the encodings of activations and of gradients."""
    rectified = fleet.server.profile.layers[split_point - 1].rectified
    if member.encoding != "auto":
        given = member.encoding if rectified else encodings.dense(member.encoding)
        return given, given if fleet.trains(split_point) else "raw"
    device, server, link = member.costs, fleet.server, member.link
    up = _quickest(device, server, split_point, samples, "up", link.up_bps, rectified=rectified)
    if not fleet.trains(split_point):
        return up, "raw"
    down = _quickest(server, device, split_point, samples, "down", link.down_bps, rectified=rectified)
    return up, down


def _quickest(
    sender: Costs,
    receiver: Costs,
    split_point: int,
    samples: int,
    direction: str,
    rate_bps: float | None,
    *,
    rectified: bool,
) -> str:
    """Return the exact encoding that takes the least time; raw if it ties, and where bytes take no time."""
    if rate_bps is None:
        return "raw"
    profile = sender.profile  # in a timing-only run, tensors are as large as the sender's profile says

    def seconds(encoding: str) -> float:
        chunks = profile.chunk_bytes(split_point, samples, encoding, direction)
        size = sum(chunks)
        encode_s = _coding_only_s(sender, "encode", encoding, size, len(chunks))
        sent_s = size * profile.share(split_point, direction, encoding) * 8 / rate_bps
        return encode_s + sent_s + _coding_only_s(receiver, "decode", encoding, size, len(chunks))

    measured = profile.layers[split_point - 1].shares
    allowed = [
        encoding
        for encoding in encodings.EXACT
        if encoding in measured
        and encoding in sender.profile.coding
        and encoding in receiver.profile.coding
        and (rectified or not encodings.is_sparse(encoding))
    ]
    return min(("raw", *allowed), key=seconds)


def _coding_only_s(costs: Costs, kind: str, encoding: str, size_bytes: int, chunks: int) -> float:
    """Return the seconds of coding without those of a message in any encoding: a call with nothing to copy."""
    return max(0.0, costs.coding_s(kind, encoding, size_bytes, chunks) - costs.coding_s(kind, "raw", 0))
