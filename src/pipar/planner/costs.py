"""The cost model: how long a piece of work takes on a machine that was profiled.

Compute stages sum their layers' times at the micro-batch's own size. The paper divides the full batch's time by
N; a small micro-batch costs more than that, so we interpolate between measured batch sizes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from pipar.execution.work import Work
from pipar.profiling.profile import LONGEST_S, CodingTimes, LayerProfile, Profile, most_contention
from pipar.wire import encodings

_FORWARD = ("fc", "fs", "validate")
_BACKWARD = ("bc", "bs")


class Costs:
    """Seconds of work on the profile's machine, divided by `speed`: 0.05 is a machine twenty times slower.

    `layers` are additional factors, one for each layer's time. An overhead of 0 in the profile costs exactly 0.0.
    """

    def __init__(self, profile: Profile, speed: float = 1.0, layers: Sequence[float] = ()) -> None:
        self.profile = profile
        self.speed = speed
        self._times = tuple(layers) or (1.0,) * len(profile.layers)
        assert len(self._times) == len(profile.layers)
        # By kind and encoding: seconds of the work, of each chunk in it, of each byte. Work without an encoding is raw.
        self._by_size: dict[tuple[str, str], tuple[float, float, float]] = {
            (kind, "raw"): (getattr(profile, f"{kind}_s") / speed, 0.0, getattr(profile, f"{kind}_s_per_byte") / speed)
            for kind in ("pack", "install", "aggregate")
        }
        for kind in ("protect", "noise"):
            self._by_size[kind, "raw"] = 0.0, 0.0, profile.noise_s_per_byte / speed
        changes = profile.coding.get("changes", CodingTimes())
        for kind, of in (("pack", "encode"), ("install", "decode")):
            call, _, byte = self._by_size[kind, "raw"]
            more = (getattr(changes, f"{of}_s") / speed, getattr(changes, f"{of}_s_per_byte") / speed)
            self._by_size[kind, "changes"] = call + more[0], 0.0, byte + more[1]
        # A device's trained part is decoded when it arrives, and installed together with all others.
        self._by_size["decode", "changes"] = changes.decode_s / speed, 0.0, changes.decode_s_per_byte / speed
        message_s = profile.decode_s / speed
        for encoding in encodings.ALL:
            times = profile.coding_times(encoding)
            chunk_s = times.decode_s / speed if encoding in profile.coding else 0.0
            self._by_size["encode", encoding] = 0.0, times.encode_s / speed, times.encode_s_per_byte / speed
            self._by_size["decode", encoding] = message_s, chunk_s, times.decode_s_per_byte / speed
        # A virtual run asks millions of times for a handful of shapes. Work by size is computed each time instead:
        # compressed sizes never repeat, and a cache of them would only fill memory.
        self._known: dict[tuple[str, int, int, int], float] = {}
        self._layers: dict[tuple[bool, int], tuple[float, ...]] = {}

    def varied(self, draw: Callable[[], float]) -> Costs:
        """Return the costs with every layer's forward and backward time multiplied by its own factor."""

        def one(layer: LayerProfile) -> LayerProfile:
            forward, backward = draw(), draw()
            return replace(
                layer,
                forward_s=tuple(min(LONGEST_S, seconds * forward) for seconds in layer.forward_s),
                backward_s=tuple(min(LONGEST_S, seconds * backward) for seconds in layer.backward_s),
                least_s=(),
            )

        return Costs(replace(self.profile, layers=tuple(map(one, self.profile.layers))), self.speed, self._times)

    def slower(self, times: float, layers: Sequence[float] = ()) -> Costs:
        """Return the costs of a machine on which everything takes `times` as long, and each layer its own `layers`."""
        of_layers = layers or (times,) * len(self._times)
        own = [before * factor / times for before, factor in zip(self._times, of_layers, strict=True)]
        return Costs(self.profile, self.speed / times, own)

    def seconds(self, work: Work) -> float:
        """Return how long the work takes.

        fc, fs, bc and bs depend on layers first_layer..last_layer and `samples`, of which each of `chunks` equal parts
        is computed by itself; step on those layers' parameters; load
        and validate (the whole network forward) on `samples`; aggregate, noise and protect (clipping and noise) on
        `size_bytes`; encode, decode, pack and install on `size_bytes` and the encoding. A model is "raw", or encoded as
        its "changes".
        """
        by_size = self._by_size.get((work.kind, work.encoding))
        if by_size is not None:
            return by_size[0] + by_size[1] * work.chunks + by_size[2] * work.size_bytes
        if work.kind == "load":
            return self.profile.load_s * work.samples / self.speed
        key = (work.kind, work.first_layer, work.last_layer, work.samples // work.chunks)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._compute(replace(work, samples=key[3])) / self.speed
        return known * work.chunks

    def coding_s(self, kind: str, encoding: str, size_bytes: int, chunks: int = 1) -> float:
        """Return the seconds to encode or to decode some bytes, counted before encoding, in some chunks."""
        fixed, chunk, each = self._by_size[kind, encoding]
        return fixed + chunks * chunk + each * size_bytes

    def changes_s_per_byte(self, kind: str) -> float:
        """Return how much longer a byte of a model takes to pack or to install if only its changes are sent."""
        return self._by_size[kind, "changes"][2] - self._by_size[kind, "raw"][2]

    def contention(self, samples: int) -> float:
        """Return the share by which every other busy core of the machine lengthens the work on a micro-batch."""
        ratios, sizes = self.profile.crowded, self.profile.batch_sizes
        if not ratios or not self.profile.crowd:
            return 0.0
        ratio = interpolate(sizes, ratios, min(max(samples, sizes[0]), sizes[-1]))
        return (min(ratio, most_contention(self.profile.crowd)) - 1.0) / self.profile.crowd

    def layers_s(self, kind: str, first_layer: int, last_layer: int, samples: int) -> float:
        """Return the seconds of a stage's layers, without the cost of starting it, as in the paper's estimate."""
        return math.fsum(self._layer_times(kind in _FORWARD, samples)[first_layer - 1 : last_layer]) / self.speed

    def all_layers_s(self, samples: int) -> float:
        """Return how long the whole network takes, forward and backward."""
        return sum(self.each_layer_s(samples))

    def each_layer_s(self, samples: int) -> list[float]:
        """Return the seconds of every layer, forward and backward."""
        forward, backward = (self._layer_times(is_forward, samples) for is_forward in (True, False))
        return [(one + other) / self.speed for one, other in zip(forward, backward, strict=True)]

    def least_s(self, first_layer: int, last_layer: int, samples: int) -> float:
        """Return the shortest measured time of these layers, forward and backward: a lower bound."""
        key = ("least", first_layer, last_layer, samples)
        if key not in self._known:
            sizes = self.profile.batch_sizes
            layers = list(zip(self.profile.layers, self._times, strict=True))[first_layer - 1 : last_layer]
            times = [factor * interpolate(sizes, layer.least_s or _both_s(layer), samples) for layer, factor in layers]
            self._known[key] = math.fsum(times) / self.speed
        return self._known[key]

    def _compute(self, work: Work) -> float:
        """Return the seconds on the profiled machine itself."""
        if work.kind == "validate":
            return self._validate(work.samples)
        # A stage without layers is a mistake of the caller, and would go unnoticed as a stage that takes no time.
        assert 1 <= work.first_layer <= work.last_layer <= len(self.profile.layers), work
        if work.kind == "step":
            size_bytes = self.profile.changing_bytes(work.first_layer, work.last_layer)
            return self.profile.step_s + self.profile.step_s_per_byte * size_bytes
        assert work.kind in _FORWARD + _BACKWARD, work
        times = self._layer_times(work.kind in _FORWARD, work.samples)
        at_cut = work.kind == "bc" and work.last_layer < self.profile.network_layers
        # fsum: the same float on every version of Python, in any order of the layers.
        layers = math.fsum(times[work.first_layer - 1 : work.last_layer])
        return layers + (self.profile.backward_at_cut_s if at_cut else 0.0)

    def _validate(self, samples: int) -> float:
        """Return the forward time of all layers, in chunks of the largest measured batch size."""
        chunks, rest = divmod(samples, self.profile.batch_sizes[-1])
        full = math.fsum(self._layer_times(True, self.profile.batch_sizes[-1]))
        return chunks * full + math.fsum(self._layer_times(True, rest))

    def _layer_times(self, forward: bool, samples: int) -> tuple[float, ...]:
        key = (forward, samples)
        if key not in self._layers:
            sizes = self.profile.batch_sizes
            self._layers[key] = tuple(
                factor * interpolate(sizes, layer.forward_s if forward else layer.backward_s, samples)
                for layer, factor in zip(self.profile.layers, self._times, strict=True)
            )
        return self._layers[key]


def _both_s(layer: LayerProfile) -> tuple[float, ...]:
    return tuple(map(sum, zip(layer.forward_s, layer.backward_s, strict=True)))


def interpolate(sizes: tuple[int, ...], times: tuple[float, ...], samples: int) -> float:
    """Return the time at `samples`, linear between measured sizes and in proportion above the largest.

    Below the smallest size it continues the first segment, but stays between the proportional share of the smallest
    size's time (no fixed cost) and that time itself (only fixed cost). A segment that noise has tilted must not promise
    micro-batches that cost nothing, or more the smaller they are.
    """
    if samples <= 0:
        return 0.0
    right = bisect_left(sizes, samples)
    if right == len(sizes):
        return times[-1] * (samples / sizes[-1])
    if sizes[right] == samples:
        return times[right]
    if right == 0:
        share = times[0] * (samples / sizes[0])
        line = _line(sizes[:2], times[:2], samples) if len(sizes) > 1 else share
        return min(max(line, share), times[0])
    return _line(sizes[right - 1 : right + 1], times[right - 1 : right + 1], samples)


def _line(sizes: tuple[int, ...], times: tuple[float, ...], samples: int) -> float:
    slope = (times[1] - times[0]) / (sizes[1] - sizes[0])
    return times[0] + slope * (samples - sizes[0])
