"""How long each piece of work of a round took, from the round's spans.

The time of a piece of work is counted from when its data was there and its lane was free, not from when it began: what
threads, event loops and transports take between two spans belongs to the work that they delayed. So a replay that runs
the same work in the same order ends when the round ended. What the links took is not counted: a replay sends the same
bytes at the same rates.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

from pipar.execution.spans import COMPUTE, CORE, DOWNLINK, IO, NOISE, SERVER, UPLINK, WORK_KINDS, Span
from pipar.recording.compact_times import Series
from pipar.recording.micro_batch_sizes import Places
from pipar.transport.shaping import Rates
from pipar.wire.frames import HEADER_BYTES

#: Clocks of two machines are compared by round trips, and may differ by half of one.
_SKEW_S = 0.05
#: A device may claim that its messages took years: their bytes by the rate of the link are no more than a file may say.
_MOST_BYTES = 1 << 60

#: The times of work by kind; with its samples and its chunk, if it has them: "fc/25", "encode/25/1".
Times = dict[str, Series]
_KEY = re.compile(r"([a-z]+)(?:/\d{1,9}(?:/\d{1,9})?)?")
_Place = tuple[int, int]
#: Kinds of work that are done at once; others may be done chunk by chunk.
_WHOLE = frozenset({"load", "noise", "fc", "fs", "bs", "bc", "step"})


def time_key(kind: str, samples: int, chunk: int) -> str:
    """Return the key of some work in `Times`."""
    if chunk:
        return f"{kind}/{samples}/{chunk}"
    return f"{kind}/{samples}" if samples else kind


@dataclass(frozen=True)
class Sent:
    """Bytes of tensors and of models in one direction, by their time on a link with a known rate."""

    tensor_bytes: int = 0
    model_bytes: int = 0


@dataclass(frozen=True)
class Sizes:
    """The bytes of messages in one direction: of a tensor by its samples, and of a model."""

    sample_bytes: float
    model_bytes: int

    def of(self, span: Span, places: Places) -> float:
        if span.kind == "model":
            return self.model_bytes
        if span.kind not in ("u", "d"):
            return 0.0
        samples, _ = places.find(span.kind, span.iteration, span.micro_batch)
        return samples * self.sample_bytes + HEADER_BYTES


@dataclass(frozen=True)
class LinkModel:
    """One direction of a link as a replay emulates it."""

    rates: Rates = field(default_factory=Rates)
    latency_s: float = 0.0
    #: Of a link whose rate was measured: its spans do not show when messages arrived, but their sizes do.
    sizes: Sizes | None = None
    sent: Sent = Sent()

    @property
    def is_limited(self) -> bool:
        return self.rates.cycle != (None,)

    def seconds(self, span: Span, places: Places) -> float:
        """Return how long a message was on the link."""
        if not self.is_limited:
            return 0.0
        if self.sizes is None:
            return span.end - span.start
        size_bytes = self.sizes.of(span, places)
        return self.rates.end(span.start, 8 * size_bytes) - span.start


@dataclass(frozen=True)
class DeviceModel:
    """What is known of a device in a round: its micro-batches and its link."""

    places: Places
    up: LinkModel
    down: LinkModel
    computed_until: float | None = None  # in the round before; None if that is not known

    @property
    def has_changing_link(self) -> bool:
        return len(self.up.rates.cycle) > 1 or len(self.down.rates.cycle) > 1

    @property
    def measured_bps(self) -> list[float | None]:
        """The rates up and down, if they were measured."""
        return [link.rates.cycle[0] for link in (self.up, self.down)] if self.up.sizes is not None else []


@dataclass
class RoundTimes:
    """The times of a round's work: of each device, of the server for each device, and of the server for all."""

    devices: dict[str, Times] = field(default_factory=dict)
    serving: dict[str, Times] = field(default_factory=dict)
    server: Times = field(default_factory=dict)
    up: dict[str, Sent] = field(default_factory=dict)
    down: dict[str, Sent] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # the device of each micro-batch, as the server began with them
    #: Of devices with links that change: when each of their passes could begin, on the server's clock.
    begun: dict[str, list[float]] = field(default_factory=dict)


def may_be_chunk(kind: str) -> bool:
    """Return whether the work of this kind at one place may be done in several chunks."""
    return kind not in _WHOLE


def is_pass(kind: str) -> bool:
    """Return whether this work is a forward or backward pass of a device."""
    return kind in ("fc", "bc")


def begins_micro_batch(kind: str, iteration: int) -> bool:
    """Return whether this work is the server's first one on a micro-batch."""
    return kind == "decode" and iteration > 0


def stage_times(
    spans: Iterable[Span], models: Mapping[str, DeviceModel], released: Sequence[float] = (), *, shares_model: bool
) -> RoundTimes:
    """Return the times of a round.

    `released` are times at which the server stopped waiting for a device. If devices share one server-side model, they
    also wait for each other's work on it.
    """
    lanes = _Lanes(spans)
    out = RoundTimes()
    uploads: dict[str, _Arrivals] = {}
    for name, model in models.items():
        own = lanes.of(name)
        uploads[name] = _Arrivals(own[UPLINK], "u", lanes.first_ends(own[IO], "encode"), model.up, model.places)
        down = _Arrivals(own[DOWNLINK], "d", lanes.first_ends(lanes.serving(name), "encode"), model.down, model.places)
        out.up[name], out.down[name] = uploads[name].sent(), down.sent()
        times, begun = _device_times(own, down, model)
        if times:
            out.devices[name] = times
        if begun and model.has_changing_link:
            out.begun[name] = begun
    _server_times(lanes.cores, uploads, models, released, out, shares_model=shares_model)
    return out


class _Lanes:
    """The spans of busy lanes, by owner and lane, in order."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.cores: list[Span] = []
        self._own: dict[str, dict[str, list[Span]]] = {}
        self._serving: dict[str, list[Span]] = {}
        # Each lane's spans are in order already, those of no duration before the next one.
        for span in sorted((span for span in spans if not span.waiting), key=attrgetter("start")):
            if span.owner != SERVER:
                self.of(span.owner)[span.lane].append(span)
            elif span.lane.startswith(CORE):
                self.cores.append(span)
                self._serving.setdefault(span.device, []).append(span)

    def of(self, owner: str) -> dict[str, list[Span]]:
        if owner not in self._own:
            self._own[owner] = {lane: [] for lane in (COMPUTE, IO, NOISE, UPLINK, DOWNLINK)}
        return self._own[owner]

    def serving(self, device: str) -> list[Span]:
        return self._serving.get(device, [])

    @staticmethod
    def first_ends(spans: Sequence[Span], kind: str) -> dict[_Place, float]:
        """Return when the first work of a kind at each place ended."""
        ends: dict[_Place, float] = {}
        for span in spans:
            if span.kind == kind:
                ends.setdefault((span.iteration, span.micro_batch), span.end)
        return ends


class _Arrivals:
    """When messages over one direction of a link arrived, had each left as soon as it was encoded."""

    def __init__(
        self, spans: Sequence[Span], kind: str, ready: Mapping[_Place, float], model: LinkModel, places: Places
    ) -> None:
        self.of_tensors: dict[_Place, float] = {}
        #: Control messages and models: when work may first have begun with each, and when it arrived. A measured rate
        #: may be too low for one message, and work on it then begins before it has arrived at that rate.
        self.commands: list[tuple[float, float]] = []
        self.models: list[tuple[float, float]] = []
        self._spans, self._kind, self._model = spans, kind, model
        free_at = 0.0
        for span in spans:
            place = (span.iteration, span.micro_batch)
            start = min(span.start, ready.get(place, span.start)) if span.kind == kind else span.start
            if model.sizes is not None or span.kind == kind:
                start = max(start, free_at)
            if model.sizes is None:
                start = min(start, span.start)
            free_at = start + model.seconds(span, places)
            arrived = free_at + model.latency_s
            if span.kind == kind:
                self.of_tensors[place] = arrived
            elif span.kind in ("control", "model"):
                message = (arrived if model.sizes is None else span.start, arrived)
                insort(self.commands, message)
                if span.kind == "model":
                    insort(self.models, message)

    def sent(self) -> Sent:
        """Return the bytes that were sent, if the rate is known."""
        if not self._model.is_limited:
            return Sent()
        if self._model.sizes is not None:
            return self._model.sent
        bits = {"model": 0.0, self._kind: 0.0}
        for span in self._spans:
            if span.kind in bits:
                bits[span.kind] += self._model.rates.bits(span.start, span.end)
        tensor_bytes, model_bytes = (round(min(bits[kind] / 8, _MOST_BYTES)) for kind in (self._kind, "model"))
        return Sent(tensor_bytes, model_bytes)


def _last(times: Sequence[float], until: float) -> float | None:
    """Return the last of some sorted times up to a moment."""
    place = bisect_right(times, until)
    return times[place - 1] if place else None


def _arrival(messages: Sequence[tuple[float, float]], until: float) -> float | None:
    """Return when the last message arrived with which work may have begun up to a moment."""
    place = bisect_right(messages, until, key=itemgetter(0))
    return messages[place - 1][1] if place else None


class _Collected:
    """Collects times by key and position, and counts the chunks at each place."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._times: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
        self._chunks: dict[tuple[str, int, int], int] = {}

    def add(self, span: Span, *ready: float | None) -> float:
        """Add the work of a span whose lane and data were there at these times; return when it could begin."""
        # Thousands of spans a round come here: nothing is built that the next one would build again.
        since = -math.inf
        for time in ready:
            if time is not None and time > since:
                since = time
        if since == -math.inf:
            since = span.start
        seconds = span.end - since
        kind, chunk = span.kind, 0
        if may_be_chunk(kind):
            where = (kind, span.iteration, span.micro_batch)
            chunk = self._chunks.get(where, 0)
            self._chunks[where] = chunk + 1
        samples, position = self._places.find(kind, span.iteration, span.micro_batch)
        key = (kind, samples, chunk)
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = []
        found.append((position, seconds if seconds > 0.0 else 0.0))
        return since

    def times(self) -> Times:
        return {
            time_key(*key): Series.of([seconds for _, seconds in sorted(found)]) for key, found in self._times.items()
        }


def _device_times(
    lanes: Mapping[str, Sequence[Span]], down: _Arrivals, model: DeviceModel
) -> tuple[Times, list[float]]:
    """Return the times of a device's work, and when each of its passes could begin."""
    out, begun = _Collected(model.places), []
    fed = {(span.kind, span.iteration): span.end for lane in (IO, NOISE) for span in lanes[lane]}
    decoded = {(s.iteration, s.micro_batch): s.end for s in lanes[IO] if s.kind == "decode"}
    forwarded = {(s.iteration, s.micro_batch): s.end for s in lanes[COMPUTE] if s.kind == "fc"}
    last_forward = {iteration: end for (iteration, _), end in sorted(forwarded.items(), key=lambda one: one[1])}
    before: float | None = None
    for span in lanes[COMPUTE]:
        data: float | None = None
        match span.kind:
            case "fc" if span.micro_batch == 1:
                data = fed.get(("noise", span.iteration), fed.get(("load", span.iteration)))
            case "bc":
                data = decoded.get((span.iteration, span.micro_batch))
            case "install":
                data = _arrival(down.models, span.start + _SKEW_S) or _arrival(down.commands, span.start + _SKEW_S)
        since = out.add(span, before, data)
        if is_pass(span.kind):
            begun.append(since)
        before = span.end
    before = None
    encoded: dict[_Place, float] = {}
    for span in lanes[IO]:
        place = (span.iteration, span.micro_batch)
        match span.kind:
            case "load" if span.iteration == 1:
                # A device begins a round when it has been told to, and has installed the model of the round before.
                data = span.start if model.computed_until is None else _arrival(down.commands, span.start + _SKEW_S)
                before = model.computed_until if before is None else before
            case "load":
                data = last_forward.get(span.iteration - 1)
            case "encode":
                data = encoded.get(place, forwarded.get(place))
                encoded[place] = span.end
            case _:
                data = down.of_tensors.get(place)
        out.add(span, before, data)
        before = span.end
    before = None
    for span in lanes[NOISE]:
        out.add(span, before, fed.get(("load", span.iteration)))
        before = span.end
    return out.times(), begun


def _server_times(
    cores: Sequence[Span],
    uploads: Mapping[str, _Arrivals],
    models: Mapping[str, DeviceModel],
    released: Sequence[float],
    out: RoundTimes,
    *,
    shares_model: bool,
) -> None:
    serving = {name: _Collected(model.places) for name, model in models.items()}
    own = _Collected(Places())
    ends = sorted(span.end for span in cores)
    waited_for = sorted([*ends, *released, *(at for one in uploads.values() for _, at in one.models)])
    of_lane: dict[str, float] = {}
    of_device: dict[str, float] = {}
    for span in cores:
        ready = [of_lane.get(span.lane)]
        if span.device not in serving:
            # The server waits for all devices here, and for those that it gives up.
            own.add(span, *ready, _last(waited_for, span.start))
        else:
            upload = uploads[span.device]
            ready.append(of_device.get(span.device))
            if begins_micro_batch(span.kind, span.iteration):
                ready.append(_tensor(upload, span))
                out.order.append(span.device)
            elif span.kind == "decode":
                ready.append(_arrival(upload.models, span.start + _SKEW_S))
            if shares_model:
                ready.append(_last(ends, span.start))
            serving[span.device].add(span, *ready)
            of_device[span.device] = span.end
        of_lane[span.lane] = span.end
    out.server = own.times()
    out.serving = {name: times for name, found in serving.items() if (times := found.times())}


def _tensor(upload: _Arrivals, span: Span) -> float | None:
    return upload.of_tensors.get((span.iteration, span.micro_batch))


def times_to_json(times: Times) -> dict[str, Any]:
    return {key: series.to_json() for key, series in times.items()}


def read_times(tree: Any) -> Times:
    """Return the times that `times_to_json` has written, or raise ValueError."""
    times = {str(key): Series.read(value) for key, value in dict(tree).items()}
    unknown = [key for key in times if not (match := _KEY.fullmatch(key)) or match[1] not in WORK_KINDS]
    if unknown:
        raise ValueError(f"'{unknown[0][:40]}' is not a kind of work")
    return times
