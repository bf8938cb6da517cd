"""How long the stages of a batch take a device, its link and the server, and the exchange of models after them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pipar.execution.work import Work
from pipar.methods import Plan
from pipar.planner.fleet import Fleet, Member
from pipar.profiling.profile import Profile
from pipar.wire.frames import CHUNK_BYTES, HEADER_BYTES
from pipar.wire.messages import NUMBER_BYTES

#: Frames of encoded tensors carry their shape.
_CODED_HEADER_BYTES = HEADER_BYTES + 2 * 4

#: The share of a tensor in each of its chunks.
ChunkShares = tuple[float, ...]
_WHOLE: ChunkShares = (1.0,)


@dataclass(frozen=True)
class BatchTimes:
    """Seconds of every stage of one batch of one device; lists have one entry for each micro-batch."""

    load: float
    fc: list[float]
    encode: list[float]
    u: list[float]
    served: list[float]  # decode, f_s, b_s and encode: one job of the server
    d: list[float]
    decode: list[float]
    bc: list[float]
    step: float
    server_step: float
    contention: list[float]  # the share by which every other busy core lengthens a job of the server
    answer: list[float]  # the encode at the end of `served`
    up_chunks: list[ChunkShares]  # of encoding activations: each chunk is sent while the next one is encoded
    down_chunks: list[ChunkShares]
    up_sent: list[ChunkShares]  # of u
    down_sent: list[ChunkShares]
    at_once: int = 1  # micro-batches that the server computes at the same time
    noise: float = 0.0  # added to the inputs of the batch, between its load and its first forward

    @cached_property
    def served_s(self) -> float:
        """The server's work on all micro-batches."""
        return sum(self.served)

    @cached_property
    def lane_s(self) -> float:
        """How long the busiest lane works; the server has one for each device, or a few."""
        computed = sum(self.fc) + sum(self.bc) + self.step
        served_s = self.served_s / self.at_once
        return max(computed, sum(self.encode) + sum(self.decode), sum(self.u), served_s, sum(self.d))

    @cached_property
    def after_server_s(self) -> float:
        """The least time from the end of the server's work on the last micro-batch to the end of the iteration."""
        return self.d[-1] * self.down_sent[-1][-1] + self.decode[-1] + self.bc[-1] + self.step


def work_key(member: Member, plan: Plan) -> tuple[object, ...]:
    """Return what the times of a device depend on: for devices with the same key they are computed once."""
    return (id(member.costs), member.link, plan, member.samples)


def batch_times(fleet: Fleet, member: Member, plan: Plan, batch: int) -> BatchTimes:
    """Return the seconds of every stage of a batch of `batch` samples; P = Q has only compute.

    If the server keeps activations, they are the mean over epochs that send them and epochs that refer to them.
    """
    sent, share = _sent_times(fleet, member, plan, batch), fleet.recalled_share(member, plan)
    return _mean_times(fleet, member, plan, batch, sent, share) if share else sent


def _mean_times(fleet: Fleet, member: Member, plan: Plan, batch: int, sent: BatchTimes, recalled: float) -> BatchTimes:
    """Return the times with a share of epochs in which a device only refers to activations."""
    pieces, server = fleet.pieces(batch, plan.micro_batches), fleet.server
    at_cut = server.profile.output_bytes(plan.split_point)

    def mean(usual: list[float], other: Callable[[int], float]) -> list[float]:
        return [(1 - recalled) * one + recalled * other(m) for one, m in zip(usual, pieces, strict=True)]

    def saved_s(m: int) -> float:
        """Return how much longer the server decodes activations than it looks them up."""
        chunks = len(server.profile.chunk_bytes(plan.split_point, m, plan.up, "up"))
        usual_s = server.coding_s("decode", plan.up, m * at_cut + fleet.targets.of(m), chunks)
        return usual_s - server.coding_s("decode", "raw", referring(m))

    def referring(m: int) -> int:
        return m * NUMBER_BYTES + fleet.targets.message_bytes

    nothing: Callable[[int], float] = lambda _: 0.0  # noqa: E731
    return replace(
        sent,
        load=(1 - recalled) * sent.load,
        fc=mean(sent.fc, nothing),
        encode=mean(sent.encode, nothing),
        u=mean(sent.u, lambda m: transfer_s(referring(m), member.link.up_bps)),
        served=[one - recalled * saved_s(m) for one, m in zip(sent.served, pieces, strict=True)],
        up_chunks=[_WHOLE] * len(pieces) if recalled == 1.0 else sent.up_chunks,
        up_sent=[_WHOLE] * len(pieces) if recalled == 1.0 else sent.up_sent,
    )


def _sent_times(fleet: Fleet, member: Member, plan: Plan, batch: int) -> BatchTimes:
    """Return the times of an epoch in which activations are computed and sent."""
    costs, server, link = member.costs, fleet.server, member.link
    p, pieces = plan.split_point, fleet.pieces(batch, plan.micro_batches)
    whole, trains = p == fleet.layers, fleet.trains(p)
    at_cut, back = server.profile.output_bytes(p), server.profile.gradient_bytes(p)

    def each(seconds: Callable[[int], float]) -> list[float]:
        by_size = {m: seconds(m) for m in set(pieces)}  # pieces have one of two sizes
        return [by_size[m] for m in pieces]

    def chunks(m: int, direction: str) -> int:
        return len(server.profile.chunk_bytes(p, m, plan.up if direction == "up" else plan.down, direction))

    def in_chunks(encoding: str, direction: str) -> list[ChunkShares]:
        if whole or (encoding == "raw" and not server.profile.crossing_bytes(p, direction)):
            return [_WHOLE] * len(pieces)
        coder = costs if direction == "up" else server
        shares = {
            m: _shares(
                [
                    coder.coding_s("encode", encoding, size)
                    for size in server.profile.chunk_bytes(p, m, encoding, direction)
                ]
            )
            for m in set(pieces)
        }
        return [shares[m] for m in pieces]

    def on_link(encoding: str, direction: str) -> list[ChunkShares]:
        if whole or (encoding == "raw" and not server.profile.crossing_bytes(p, direction)):
            return [_WHOLE] * len(pieces)
        profile, targets = (costs.profile, fleet.targets) if direction == "up" else (server.profile, None)
        shares = {
            m: _shares(chunk_frames(profile, plan, m, direction, 0 if targets is None else targets.of(m)))
            for m in set(pieces)
        }
        return [shares[m] for m in pieces]

    def answer(m: int) -> float:
        return 0.0 if not trains else server.coding_s("encode", plan.down, m * back, chunks(m, "down"))

    def served(m: int) -> float:
        job = [Work(kind, 0, 0, 0, p + 1, fleet.layers, m) for kind in ("fs", "bs")]
        received = m * at_cut + fleet.targets.of(m)
        decode_s = server.coding_s("decode", plan.up, received, chunks(m, "up"))
        return decode_s + sum(map(server.seconds, job)) + answer(m)

    def down(m: int) -> float:
        """Return the time of a gradient on the link; without anything to train, the answer is empty."""
        return (
            _crossing_s(server.profile, plan, m, "down", link.down_bps, 0) if trains else transfer_s(0, link.down_bps)
        )

    none = [0.0] * len(pieces)
    return BatchTimes(
        load=costs.seconds(Work("load", samples=batch)),
        fc=each(lambda m: costs.seconds(Work("fc", last_layer=p, samples=m, chunks=m if fleet.is_steady(p) else 1))),
        encode=none if whole else each(lambda m: costs.coding_s("encode", plan.up, m * at_cut, chunks(m, "up"))),
        u=none
        if whole
        else each(lambda m: _crossing_s(costs.profile, plan, m, "up", link.up_bps, fleet.targets.of(m))),
        served=none if whole else each(served),
        d=none if whole else each(down),
        decode=none
        if whole or not trains
        else each(lambda m: costs.coding_s("decode", plan.down, m * back, chunks(m, "down"))),
        bc=each(lambda m: costs.seconds(Work("bc", last_layer=p, samples=m))) if trains else none,
        step=costs.seconds(Work("step", last_layer=p)) if trains else 0.0,
        server_step=0.0 if whole else server.seconds(Work("step", first_layer=p + 1, last_layer=fleet.layers)),
        contention=each(server.contention),
        answer=none if whole else each(answer),
        up_chunks=in_chunks(plan.up, "up"),
        down_chunks=in_chunks(plan.down, "down") if trains else [_WHOLE] * len(pieces),
        up_sent=on_link(plan.up, "up"),
        down_sent=on_link(plan.down, "down") if trains else [_WHOLE] * len(pieces),
        noise=costs.seconds(Work("noise", size_bytes=batch * fleet.noised_bytes)),
        at_once=fleet.at_once(plan),
    )


def lane_s(fleet: Fleet, member: Member, plan: Plan) -> dict[str, float]:
    """Return how long a device's own lanes work in one epoch: its iterations' stages, and the models on its link."""
    counts = fleet.batch_counts(member.samples)
    every = [(batch_times(fleet, member, plan, batch), count) for batch, count in counts.items()]
    link = member.link
    return {
        "device": sum(count * (sum(times.fc) + sum(times.bc) + times.step) for times, count in every),
        "uplink": sum(count * sum(times.u) for times, count in every) + model_s(fleet, member, plan, link.up_bps),
        "downlink": sum(count * sum(times.d) for times, count in every) + model_s(fleet, member, plan, link.down_bps),
    }


def move_s(fleet: Fleet, before: Mapping[str, Plan], after: Mapping[str, Plan]) -> float:
    """Return how much longer a round takes after which layers move: new replicas, and parts that are sent whole."""
    moved = [m for m in fleet.members if before[m.name].split_point != after[m.name].split_point]
    if not moved:
        return 0.0
    profile = fleet.server.profile
    replicas = Work("install", size_bytes=profile.parameter_bytes(1, fleet.layers) * len(moved))

    def longer_s(member: Member) -> float:
        rate_bps, now, then = member.link.down_bps, after[member.name], before[member.name]
        whole = profile.parameter_bytes(1, now.split_point)
        return transfer_s(whole, rate_bps) - model_s(fleet, member, then, rate_bps)

    return fleet.server.seconds(replicas) + max(0.0, *map(longer_s, moved))


def protect_s(fleet: Fleet, member: Member, size_bytes: int) -> float:
    """Return how long a device clips its update and adds noise to it; 0 without noise on updates."""
    return member.costs.seconds(Work("protect", size_bytes=size_bytes)) if fleet.protects else 0.0


def model_s(fleet: Fleet, member: Member, plan: Plan, rate_bps: float | None) -> float:
    """Return how long a device's part is on a link, after the first round: as changes where that is faster."""
    changes = fleet.sends_changes(member, rate_bps)
    return transfer_s(fleet.server.profile.exchanged_bytes(plan.split_point, changes=changes), rate_bps)


def _crossing_s(
    profile: Profile, plan: Plan, samples: int, direction: str, rate_bps: float | None, targets: int
) -> float:
    """Return how long a micro-batch's activations with these bytes of targets, or its gradients, are on the link."""
    return 0.0 if rate_bps is None else crossing_bytes(profile, plan, samples, direction, targets) * 8 / rate_bps


def crossing_bytes(profile: Profile, plan: Plan, samples: int, direction: str, targets: int) -> int:
    """Return the bytes of a micro-batch's activations with these bytes of targets, or its gradients, with headers."""
    p, encoding = plan.split_point, plan.up if direction == "up" else plan.down
    if encoding == "raw" and not profile.crossing_bytes(p, direction):
        return framed_bytes(samples * profile.output_bytes(p) + targets)
    return sum(chunk_frames(profile, plan, samples, direction, targets))


def chunk_frames(profile: Profile, plan: Plan, samples: int, direction: str, targets: int) -> list[int]:
    """Return the bytes of the frame of each chunk; the targets follow the last one."""
    p, encoding = plan.split_point, plan.up if direction == "up" else plan.down
    several = len(profile.crossing_bytes(p, direction))
    header = HEADER_BYTES + 3 * 4 * several if several else _CODED_HEADER_BYTES
    sizes = [size + header for size in profile.coded_bytes(p, samples, direction, encoding)]
    sizes[-1] += targets
    return sizes


def _shares(parts: Sequence[float]) -> ChunkShares:
    total = sum(parts)
    return tuple(part / total if total else 1.0 / len(parts) for part in parts)


def message_bytes(fleet: Fleet, plan: Plan, batch: int) -> list[int]:
    """Return the bytes of all activations and gradients of a batch, message by message, without headers."""
    profile = fleet.server.profile
    sizes: list[int] = []
    for samples in fleet.pieces(batch, plan.micro_batches):
        sizes.append(sum(profile.coded_bytes(plan.split_point, samples, "up", plan.up)) + fleet.targets.of(samples))
        if fleet.trains(plan.split_point):
            sizes.append(sum(profile.coded_bytes(plan.split_point, samples, "down", plan.down)))
    return sizes


def transfer_s(size_bytes: int, rate_bps: float | None) -> float:
    """Return how long a message of this size is on a link, with the headers of its frames."""
    return 0.0 if rate_bps is None else framed_bytes(size_bytes) * 8 / rate_bps


def framed_bytes(size_bytes: int) -> int:
    """Return the bytes of a message with the headers of its frames."""
    return size_bytes + max(1, math.ceil(size_bytes / CHUNK_BYTES)) * HEADER_BYTES


def decoding(size_bytes: int) -> Work:
    """Return the work of decoding a model that was sent as changes."""
    return Work("decode", size_bytes=size_bytes, encoding="changes")
