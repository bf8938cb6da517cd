"""The rate of one direction of one link, in bits a second of everything that is sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pacer:
    """Says when a frame's transmission starts and ends on a lane that sends one frame at a time.

    It counts in planned times, not in the times at which a late timer woke somebody up, so the long-run
    rate is the configured one however coarse the timers are.
    """

    rate_bps: float | None
    free_at: float = 0.0

    def reserve(self, ready_at: float, size_bytes: int) -> tuple[float, float]:
        """Return start and end of sending `size_bytes` that were ready at `ready_at`; the lane is taken until then."""
        start = max(ready_at, self.free_at)
        self.free_at = start + (size_bytes * 8 / self.rate_bps if self.rate_bps else 0.0)
        return start, self.free_at
