"""How much a device may send with its orders, so that the server's memory stays bounded."""

from __future__ import annotations

import math

from pipar.execution.spans import MOST_SPANS, SPAN_BYTES
from pipar.profiling.profile import Profile
from pipar.server.interfaces import Learner
from pipar.server.session import Allowance, Session
from pipar.wire.frames import SMALL_BODY_BYTES
from pipar.wire.messages import LABELS, TargetSize
from pipar.wire.orders import Orders

#: The most that a trace takes for each micro-batch of an epoch.
_SPAN_BYTES = 1024
_LARGEST_TRACE_BYTES = SMALL_BODY_BYTES + MOST_SPANS * SPAN_BYTES


class MessageLimits:
    """Sets the limits of sessions by the plans of their devices."""

    def __init__(self, learner: Learner, network: Profile | None, targets: TargetSize = LABELS) -> None:
        self._learner = learner
        self._targets = targets
        self._network = network

    def _state_bytes(self, network: Profile) -> int:
        """Return the most that the optimiser state of all layers takes."""
        return math.ceil(max(1.0, network.state_copies) * self._learner.model_bytes())

    def set(self, session: Session, orders: Orders) -> None:
        """Let a device send no more than its plan needs."""
        plan, network = orders.plan, self._network
        if network is None:
            session.allow(Allowance(plan.micro_batches))
            return
        # A left-over sample may join the last batch; with batch statistics a short batch is cut into two and three.
        largest_piece = max(-(-(orders.batch_size + 1) // plan.micro_batches), 3 if orders.batch_statistics else 1)
        iterations = (session.introduction.samples // orders.batch_size + 2) * orders.local_epochs
        spans_bytes = _SPAN_BYTES * iterations * (plan.micro_batches + 1)
        session.allow(
            Allowance(
                plan.micro_batches,
                is_sized=True,
                activation_bytes=self._activation_bytes(network, plan.split_point, largest_piece),
                model_bytes=self._learner.part_bytes(session.device, frozen=False),
                state_bytes=self._state_bytes(network) if orders.keep_state else 0,
                trace_bytes=min(_LARGEST_TRACE_BYTES, SMALL_BODY_BYTES + spans_bytes),
            )
        )

    def _activation_bytes(self, network: Profile, split_point: int, samples: int) -> int:
        return samples * network.output_bytes(split_point) + self._targets.of(samples)
