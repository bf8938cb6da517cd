"""How quickly a run gets on by the clock on the wall, and when it will be done."""

from __future__ import annotations

#: How many of the last epochs say how quick the next ones will be: links and plans may have changed before them.
_EPOCHS = 3
#: Less of an epoch than this says nothing about how long all of them take.
_TELLING_SHARE = 0.02


class Pace:
    """Notes how many epochs, and which share of the next one, are done at which time."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[float, float]] = {}  # by epoch: its first sign, as (epochs done, time)
        self._last: tuple[float, float] | None = None

    def begin(self, done: float, at: float) -> None:
        """The first epoch begins no earlier than at this time, unless there was a sign of it.

        Without it the first signs, which come of all devices at once, would look like a great pace.
        """
        if self._last is None:
            self._begun = {int(done): (done, at)}

    def note(self, done: float, at: float) -> None:
        """At this time so many epochs were done."""
        if self._last is None or done > self._last[0]:
            self._begun.setdefault(int(done), (done, at))
            self._last = (done, at)

    def ends_at(self, epochs: int) -> float | None:
        """Return when so many epochs will be done, as far as the last few tell; None if they do not."""
        if self._last is None:
            return None
        done, at = self._last
        first = min(epoch for epoch in self._begun if epoch >= int(done) - _EPOCHS)
        done_before, at_before = self._begun[first]
        if done - done_before < _TELLING_SHARE or at <= at_before:
            return None
        return at + (epochs - done) * (at - at_before) / (done - done_before)
