"""The forward phase of one iteration on a device, in one step: when activations arrive and its lanes are free again.

It is what the events of `SimulatedEpoch` give if no gradient arrives before the last activation waits to be encoded:
then nothing on the device depends on what others do. Devices of one kind share the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipar.planner.stage_times import BatchTimes


@dataclass(frozen=True, slots=True)
class ForwardPhase:
    """Seconds after the first forward begins."""

    computed_s: float  # the last forward
    arrivals_s: tuple[float, ...]  # of activations at the server; empty if the device has the whole network
    loaded_s: float  # the next batch
    io_free_s: float
    up_free_s: float
    first_encoded_s: float  # before this, the uplink need not be free
    last_request_s: float  # until then, a gradient would delay the encoding of an activation
    answer_s: float  # the least time from the begin of the server's first job to the arrival of its gradient

    def is_undisturbed(self, free_s: float) -> bool:
        """Return whether no gradient can arrive too early, if no core of the server is free before `free_s`."""
        return not self.arrivals_s or max(self.arrivals_s[0], free_s) + self.answer_s >= self.last_request_s


def forward_phase(
    times: BatchTimes, latency_s: float, *, splits: bool, trains: bool, loads_s: float | None, up_free_s: float = 0.0
) -> ForwardPhase:
    """Return the forward phase of a batch; all forwards come first, and the io lane is free when the first one ends.

    `loads_s` is the load of the next batch, and `up_free_s` when the uplink is free.
    """
    computed: list[float] = []
    at = 0.0
    for seconds in times.fc:
        at += seconds
        computed.append(at)
    io = encoded = first = loaded = 0.0
    waits_to_load, last_request, up, arrivals = loads_s is not None, at, up_free_s, []
    for n, ready in enumerate(computed if splits else ()):
        for encode_share, sent_share in zip(times.up_chunks[n], times.up_sent[n], strict=True):
            request = max(ready, encoded)
            if waits_to_load and request > at:  # the load waits for the lane as well, and longer
                io = loaded = max(at, io) + (loads_s or 0.0)
                waits_to_load = False
            io = encoded = max(request, io) + times.encode[n] * encode_share
            last_request = max(last_request, request)
            first = first or encoded
            up = max(encoded, up) + times.u[n] * sent_share
        arrivals.append(up + latency_s)
    if waits_to_load:
        io = loaded = max(at, io) + (loads_s or 0.0)
    # Without anything to train, nothing is decoded.
    answer_s = times.served[0] + times.d[0] * times.down_sent[0][-1] + latency_s if trains else math.inf
    return ForwardPhase(at, tuple(arrivals), loaded, io, up, first, last_request, answer_s)
