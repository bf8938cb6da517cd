"""How much memory a device needs for a plan, and which plans fit into its memory.

    bytes = base + w + (1 + o) v + g + m b s + b t

w are the parameter bytes of layers 1..P, and v those of them that are trained, which have gradients, and o values of
the optimiser for each (1 for SGD with momentum, 2 for Adam); v counts once more where the device keeps the last model
that it received, to send its changes. g are the trained bytes of the largest
of these layers, because a micro-batch's gradient exists before it is added to the others. m micro-batches of b samples
are in flight, each sample keeps s bytes from its forward until its backward, and the micro-batch that computes holds t
more bytes per sample in the layer that needs most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipar.execution.schedule import cut_batch
from pipar.methods import Plan
from pipar.profiling.profile import SHARES, Profile
from pipar.units import format_bytes
from pipar.wire.orders import Orders

#: A device's process without its network: Python, torch with its kernels, grpc, and torch's compiler, which an
#: optimiser imports. Measured as the resident set of such a process (x86, torch 2.13 for CPUs): 231 MiB after
#: importing torch and pipar, 253 with a first convolution and grpc, and 339 to 378 MiB in training, less what the
#: formula gives for the training itself.
BASE_BYTES = 368 * 2**20


def training_bytes(
    profile: Profile, plan: Plan, batch_size: int, *, batch_statistics: bool = False, keeps_base: bool = False
) -> int:
    """Return the bytes that a device's process needs to train with this plan.

    Without a window all micro-batches are in flight, because all forwards come first; with one, at most `window` of
    them. P = Q has no micro-batches: the whole batch is in flight.
    """
    split_point = plan.split_point
    assert 1 <= split_point <= len(profile.layers), plan
    whole = split_point == profile.network_layers
    pieces = cut_batch(batch_size, 1 if whole else plan.micro_batches, batch_statistics=batch_statistics)
    in_flight = min(plan.window, len(pieces)) if plan.window else len(pieces)
    layers = profile.layers[:split_point]
    if split_point <= profile.frozen_layers:  # nothing is kept for a backward but the output, until it is sent
        saved = layers[-1].output_bytes
    else:
        saved = sum(layer.saved_bytes for layer in layers)
    working = max(layer.working_bytes for layer in layers)
    largest = max(layer.parameter_bytes - layer.frozen_bytes for layer in layers)
    copies = 1 + profile.state_copies + (1 if keeps_base else 0)
    trained = math.ceil(copies * profile.changing_bytes(1, split_point))
    weights = profile.parameter_bytes(1, split_point) + trained + largest
    return BASE_BYTES + weights + sum(pieces[:in_flight]) * saved + pieces[0] * working


def replica_bytes(profile: Profile, plan: Plan, batch_size: int, *, batch_statistics: bool = False) -> int:
    """Return the bytes that the layers of one device take on the server, while it serves a micro-batch of theirs."""
    first, last = plan.split_point + 1, profile.network_layers
    if first > last:
        return 0
    layers = profile.layers[plan.split_point :]
    samples = cut_batch(batch_size, plan.micro_batches, batch_statistics=batch_statistics)[0]
    largest = max(layer.parameter_bytes - layer.frozen_bytes for layer in layers)
    trained = math.ceil((1 + profile.state_copies) * profile.changing_bytes(first, last))
    each = sum(layer.saved_bytes for layer in layers) + max(layer.working_bytes for layer in layers)
    return profile.parameter_bytes(first, last) + trained + largest + samples * each


def evaluation_bytes(profile: Profile, split_point: int, batch_size: int) -> int:
    """Return the bytes that a device's process needs to evaluate the whole network between two rounds.

    Its part of the network stays in memory with its optimiser. To that come the layers that the server has sent
    and one batch: no sample keeps anything for a backward.
    """
    whole = profile.parameter_bytes(1, len(profile.layers))
    trained = math.ceil((1 + profile.state_copies) * profile.changing_bytes(1, split_point))
    working = max(layer.working_bytes + layer.output_bytes for layer in profile.layers)
    return BASE_BYTES + whole + trained + batch_size * working


@dataclass(frozen=True)
class Memory:
    """The memory of a device's process, and what the network takes on it; None where there is no limit."""

    profile: Profile | None = None
    size_bytes: int | None = None

    def lack(self, samples: int, orders: Orders | None) -> str | None:
        """Return why the whole network does not fit beside the training, with the smallest part without orders."""
        if self.profile is None or self.size_bytes is None:
            return None
        if len(self.profile.layers) == self.profile.network_layers:
            part, batch = (1, 1) if orders is None else (orders.plan.split_point, min(samples, orders.batch_size))
            if evaluation_bytes(self.profile, part, batch) <= self.size_bytes:
                return None
        return f"the whole network does not fit into its memory of {format_bytes(self.size_bytes)}"


def fitting_window(
    profile: Profile,
    split_point: int,
    micro_batches: int,
    batch_size: int,
    memory_bytes: int,
    *,
    batch_statistics: bool = False,
    keeps_base: bool = False,
) -> int | None:
    """Return the window with which a plan fits: 0 if all forwards first fits, else the largest 1F1B window that does.

    None if not even one micro-batch in flight fits; for P = Q, if the whole batch does not.
    """

    def fits(window: int) -> bool:
        plan = Plan(split_point, micro_batches, window)
        needed = training_bytes(profile, plan, batch_size, batch_statistics=batch_statistics, keeps_base=keeps_base)
        return needed <= memory_bytes

    if fits(0):
        return 0
    if split_point == profile.network_layers:
        return None
    return next((window for window in range(micro_batches - 1, 0, -1) if fits(window)), None)


def largest_prefix(profile: Profile, batch_size: int, memory_bytes: int, *, batch_statistics: bool = False) -> int:
    """Return Q', the most first layers of the profile that fit; 0 if not even the first one does.

    Layers fit with one micro-batch of 1/32 of the batch in flight; all layers of the network, which have no
    micro-batches, with the whole batch.
    """
    micro_batches = min(batch_size, max(SHARES))
    windows = (
        fitting_window(profile, p, micro_batches, batch_size, memory_bytes, batch_statistics=batch_statistics)
        for p in range(1, len(profile.layers) + 1)
    )
    return max((p for p, window in enumerate(windows, start=1) if window is not None), default=0)
