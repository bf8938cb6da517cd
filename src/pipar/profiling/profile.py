"""The profile of one network on one machine: seconds and bytes, layer by layer; paper III-C, phase 1."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pipar.errors import ConfigError
from pipar.json_records import is_whole, list_of, object_of, only_fields, read_fields
from pipar.wire import encodings
from pipar.wire.encodings import chunk_bytes, chunk_sizes

#: Written into every file; a file of another format is refused.
FORMAT = 10
#: Other programs that use more cores than this change what is measured.
BUSY_CORES = 0.25
#: No machine that trains exceeds these. Sums and products of larger numbers might overflow.
LONGEST_S = 1e6
_MOST_THREADS = 1024
_MOST_COUNTED = 10**15
_LARGEST_BATCH = 10**6
_MOST_TENSORS = 127

#: Fields that came after the format number. With these values, as they always were before, they are left out of the
#: file: so earlier files are read here, and earlier versions read most files of this one.
_USUAL: dict[str, Any] = {
    "optimizer": "sgd",
    "state_copies": 1.0,
    "busy_cores": 0.0,
    "accelerator": "",
    "autocast": "off",
    "threads": 1,
    "one_thread": (),
}

#: Shares of the batch that are measured: the full batch, and micro-batches down to where fixed costs show. Half
#: the batch is among them because large activations do not fit caches: a line from B/4 to B is 10 % off there.
SHARES = (1, 2, 4, 16, 32)


#: The share of float32 values' bytes that a lossy encoding leaves, where it was not measured: about its format's.
_LOSSY_SHARES = {"fp16": 0.5, "bf16": 0.5, "int8": 0.26, "topk": 0.14}


def batch_sizes(batch_size: int, *, batch_statistics: bool) -> tuple[int, ...]:
    """Return B, B/2, B/4, B/16 and B/32, ascending and distinct; with batch normalisation none is below 2."""
    least = 2 if batch_statistics else 1
    return tuple(sorted({max(least, round(batch_size / share)) for share in SHARES}))


def item_bytes(dtype: str) -> int:
    """Return the bytes of one number: 4 for float32, 8 for float64."""
    return int(dtype.removeprefix("float")) // 8


@dataclass(frozen=True)
class CodingTimes:
    """Seconds to encode and to decode a chunk with one encoding: of a call, and of a byte before encoding.

    Reading a message, the profile's own `decode_s`, is added once for each tensor.
    """

    encode_s: float = 0.0
    encode_s_per_byte: float = 0.0
    decode_s: float = 0.0
    decode_s_per_byte: float = 0.0


@dataclass(frozen=True)
class LayerProfile:
    """One layer: seconds per batch for each measured batch size, and its sizes.

    `output_bytes` is one sample's output (and so its gradient) at the run's dtype; if several tensors cross the cut
    after the layer, `tensor_bytes` are those of each, and of its gradient. `parameter_bytes` counts parameters and
    buffers, `frozen_bytes` those of them that are not trained; `trained` is False if no parameter is. `least_s` is the
    shortest forward and backward together, for bounds; empty: the usual ones. `saved_bytes` is what one sample's
    training keeps from the layer's forward until its backward, with the layer's output but without its input, which the
    previous layer keeps; `working_bytes` is the most that its forward or backward holds in addition, for a sample.
    `rectified` means that the network, cut after this layer, ends in a ReLU. `shares` are the shares of the bytes at
    that cut that each encoding leaves: of the activation, and of its gradient.
    """

    name: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    output_bytes: int
    parameter_bytes: int
    least_s: tuple[float, ...] = ()
    saved_bytes: int = 0
    working_bytes: int = 0
    rectified: bool = False
    shares: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    frozen_bytes: int = 0
    trained: bool = True
    tensor_bytes: tuple[tuple[int, int], ...] = ()

    @property
    def gradient_bytes(self) -> int:
        """The bytes of one sample's gradient at the cut after this layer."""
        return sum(down for _, down in self.tensor_bytes) if self.tensor_bytes else self.output_bytes


def most_contention(others: int) -> float:
    """Return the most by which work can take longer while this many other cores compute the same.

    If all of it needed what only one core can use at a time, such as the memory or the interpreter, each core would get
    an equal share of that. A factor above this bound has other causes, such as other programs.
    """
    return 1.0 + others


@dataclass(frozen=True)
class Profile:
    """The times of a network on one machine, and of the work around it.

    The paper measures the full batch only. Times are not proportional to 1/N, so a profile has several batch sizes. It
    also has the work that the paper leaves out: loading a sample, tensors to bytes and back, the optimiser by parameter
    byte, models to bytes and back, aggregation, and noise for privacy; all but loading and noise with a fixed cost of
    each call.

    A machine that cannot hold the whole network has a profile of the first Q' layers, and `total_layers` is the number
    of the network's layers; 0 means that all are here.

    `coding` are the times of each encoding but raw, which has `encode_s` and the like; an encoding that is missing was
    not measured, and is not chosen. The times of "changes" are those to find what a round has changed in a model, and
    to apply it, in addition to packing and installing; `changes_share` is their share of the model's bytes.

    Times are those of stages that `threads` threads compute together, each on a core of its own. If these are several,
    `one_thread` is known where it was measured, and `on_one_thread` converts the profile.

    Times are those of one stage while other cores are idle. `crowded` is the factor by which a pass takes longer, at
    each batch size, while `crowd` other cores compute as well; empty: no contention.
    """

    model: str
    dtype: str
    batch_sizes: tuple[int, ...]
    layers: tuple[LayerProfile, ...]
    load_s: float = 0.0
    encode_s: float = 0.0
    encode_s_per_byte: float = 0.0
    decode_s: float = 0.0
    decode_s_per_byte: float = 0.0
    step_s: float = 0.0
    step_s_per_byte: float = 0.0
    pack_s: float = 0.0
    pack_s_per_byte: float = 0.0
    install_s: float = 0.0
    install_s_per_byte: float = 0.0
    backward_at_cut_s: float = 0.0  # the cost of starting a backward at a cut, in addition to its layers
    aggregate_s: float = 0.0
    aggregate_s_per_byte: float = 0.0
    noise_s_per_byte: float = 0.0  # to clip values, to draw Gaussian noise for them and to add it
    machine: str = ""
    how: str = ""
    total_layers: int = 0
    crowded: tuple[float, ...] = ()
    crowd: int = 0  # other cores that computed while `crowded` was measured
    coding: Mapping[str, CodingTimes] = field(default_factory=dict, hash=False)
    changes_share: float = 1.0
    optimizer: str = "sgd"  # of which `step_s` and `step_s_per_byte` are
    state_copies: float = 1.0  # values that it keeps for each trained one
    busy_cores: float = 0.0  # that other programs used while it was measured
    accelerator: str = ""  # that computed the layers; empty for the CPU
    autocast: str = "off"  # as in the configuration
    threads: int = 1  # that compute one stage
    one_thread: tuple[float, ...] = ()  # how many times as long a pass takes on one thread, at each batch size

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise ConfigError(f"The profile of '{self.model}' is not usable: {problem}.")

    @property
    def network_layers(self) -> int:
        """Q, the number of the network's layers, with those that are not in this profile."""
        return self.total_layers or len(self.layers)

    @property
    def whole(self) -> bool:
        """True if every layer of the network is here."""
        return self.network_layers == len(self.layers)

    @property
    def frozen_layers(self) -> int:
        """How many layers are before the first trained one: a device with only these has nothing to train."""
        return next((number for number, layer in enumerate(self.layers) if layer.trained), len(self.layers))

    def on_one_thread(self) -> Profile:
        """Return the profile of the same machine with one thread, or raise ConfigError if that was not measured."""
        if self.threads == 1:
            return self
        if not self.one_thread:
            raise ConfigError(f"The profile of '{self.model}' is of {self.threads} threads, and of them only.")
        layers = tuple(_slower(layer, self.one_thread) for layer in self.layers)
        how = f"{self.how}, converted to one thread"
        return replace(self, layers=layers, threads=1, one_thread=(), how=how)

    @property
    def doubt(self) -> str:
        """Why the times are not those of a quiet machine, as the end of a sentence; "" if they may be."""
        if self.busy_cores > BUSY_CORES:
            return f"was measured while other programs used {self.busy_cores:.2g} cores"
        if self.crowd and max(self.crowded, default=1.0) > most_contention(self.crowd):
            worst, most = max(self.crowded), most_contention(self.crowd)
            return f"has a contention factor of {worst:.3g}, and at most {most:g} is plausible"
        return ""

    def parameter_bytes(self, first: int, last: int) -> int:
        """Return the bytes of parameters and buffers of layers first..last, counted from 1."""
        return sum(layer.parameter_bytes for layer in self.layers[first - 1 : last])

    def changing_bytes(self, first: int, last: int) -> int:
        """Return the bytes of layers first..last without frozen parameters: what is trained, averaged and exchanged."""
        return sum(layer.parameter_bytes - layer.frozen_bytes for layer in self.layers[first - 1 : last])

    def exchanged_bytes(self, split_point: int, *, changes: bool) -> int:
        """Return the bytes of a device's part on the link after a round: what may change of it, or the changes."""
        return round(self.changing_bytes(1, split_point) * (self.changes_share if changes else 1.0))

    def output_bytes(self, layer: int) -> int:
        """Return the bytes of one sample's output of a layer, counted from 1."""
        return self.layers[layer - 1].output_bytes

    def gradient_bytes(self, layer: int) -> int:
        """Return the bytes of the gradient that one sample sends back to a layer, counted from 1."""
        return self.layers[layer - 1].gradient_bytes

    def share(self, split_point: int, direction: str, encoding: str) -> float:
        """Return the share of a tensor's bytes at a cut, "up" or "down", that an encoding leaves; 1 if unknown."""
        known = self.layers[split_point - 1].shares.get(encoding)
        if known is not None:
            return known[direction == "down"]
        return _LOSSY_SHARES[encoding] * 4 / item_bytes(self.dtype) if encoding in _LOSSY_SHARES else 1.0

    def chunk_bytes(self, split_point: int, samples: int, encoding: str, direction: str = "up") -> list[int]:
        """Return the bytes, before encoding, of each chunk that a micro-batch's tensors at a cut are encoded in.

        By sizes alone: large samples are cut anywhere here, but real ones between their rows. Of several tensors, each
        is cut by itself, also if it is raw.
        """
        if several := self.crossing_bytes(split_point, direction):
            return [size for each in several for size in chunk_sizes((samples, each), 1)]
        item = item_bytes(self.dtype)
        return chunk_bytes((samples, self.output_bytes(split_point) // item), item, encoding)

    def crossing_bytes(self, split_point: int, direction: str) -> list[int]:
        """Return the bytes of a sample of each tensor that crosses a cut, "up" or "down", if several do."""
        both = self.layers[split_point - 1].tensor_bytes
        return [one[direction == "down"] for one in both if one[direction == "down"]]

    def coded_bytes(
        self, split_point: int, samples: int, direction: str, encoding: str, share: float | None = None
    ) -> list[int]:
        """Return the bytes that an encoding leaves of each of these chunks: at least one; `share` if it is known."""
        share = self.share(split_point, direction, encoding) if share is None else share
        return [max(1, round(raw * share)) for raw in self.chunk_bytes(split_point, samples, encoding, direction)]

    def coding_times(self, encoding: str) -> CodingTimes:
        """Return the times of an encoding; those of raw values if it was not measured."""
        raw = CodingTimes(self.encode_s, self.encode_s_per_byte, self.decode_s, self.decode_s_per_byte)
        return raw if encoding == "raw" else self.coding.get(encoding, raw)

    def save(self, path: Path) -> None:
        """Write the profile as JSON that `load` reads back as the same profile."""
        path.write_text(self.to_json(), "utf-8")

    def to_json(self) -> str:
        """Return one JSON object with sorted keys and a `format` number."""
        content = {key: value for key, value in asdict(self).items() if _USUAL.get(key) != value}
        return json.dumps({"format": FORMAT, **content}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Return the profile in a file, or raise ConfigError with the file's name."""
        try:
            return cls.from_json(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"Cannot read the profile {path}: {error.strerror}.") from None
        except (ValueError, ConfigError) as error:
            why = str(error).rstrip(".")
            raise ConfigError(f"{path} is not a profile that 'pipar profile' wrote: {why}. {_WRITE_AGAIN}") from None

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Return the profile of a JSON object."""
        values = read_fields(cls, text, FORMAT, {**_USUAL, "one_thread": []})
        layers = tuple(_layer(layer) for layer in list_of(values["layers"], "layers"))
        lists = {key: tuple(list_of(values[key], key)) for key in ("batch_sizes", "crowded", "one_thread")}
        coding = {
            name: CodingTimes(**only_fields(CodingTimes, times))
            for name, times in object_of(values["coding"], "coding").items()
        }
        return cls(**{**values, "layers": layers, "coding": coding, **lists})


def _slower(layer: LayerProfile, factors: tuple[float, ...]) -> LayerProfile:
    """Return a layer that takes these factors as long, at each batch size."""

    def times(seconds: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(one * factor for one, factor in zip(seconds, factors, strict=True)) if seconds else ()

    forward_s, backward_s, least_s = map(times, (layer.forward_s, layer.backward_s, layer.least_s))
    return replace(layer, forward_s=forward_s, backward_s=backward_s, least_s=least_s)


_CODED = (*encodings.CODED, "changes")
_WRITE_AGAIN = "Write it again with 'pipar profile -o FILE'."


def _layer(tree: Any) -> LayerProfile:
    # Profiles that were written before layers could be frozen, or several tensors cross a cut, have no such fields.
    before = {"frozen_bytes": 0, "trained": True, "tensor_bytes": []}
    values = only_fields(LayerProfile, {**before, **tree} if isinstance(tree, dict) else tree)
    times = {key: tuple(list_of(values[key], key)) for key in ("forward_s", "backward_s", "least_s")}
    shares = {name: tuple(list_of(of, "shares")) for name, of in object_of(values["shares"], "shares").items()}
    crossing = tuple(tuple(list_of(one, "tensor_bytes")) for one in list_of(values["tensor_bytes"], "tensor_bytes"))
    return LayerProfile(**{**values, **times, "shares": shares, "tensor_bytes": crossing})


def _problem(profile: Profile) -> str | None:
    """Return what is wrong with a profile's numbers; None if nothing is."""
    sizes = profile.batch_sizes
    are_sizes = bool(sizes) and all(_is_count(size, _LARGEST_BATCH) and size >= 1 for size in sizes)
    if not are_sizes or list(sizes) != sorted(set(sizes)):
        return f"batch_sizes are not whole numbers from 1 to {_LARGEST_BATCH} in ascending order"
    if not profile.layers:
        return "it has no layers"
    for one in fields(profile):
        value = getattr(profile, one.name)
        if one.type == "float" and not _is_amount(value):
            return f"{one.name} is {_shown(value)}, which is not a number of seconds from 0 to {LONGEST_S:g}"
        if one.type == "str" and not isinstance(value, str):
            return f"{one.name} is not text"
    if not _is_count(profile.total_layers, _MOST_COUNTED) or 0 < profile.total_layers < len(profile.layers):
        return (
            f"total_layers is {_shown(profile.total_layers)}, but {len(profile.layers)} layers are here: give at least "
            "as many, or 0 for just these"
        )
    if not is_whole(profile.threads, 1, _MOST_THREADS):
        return f"threads is {_shown(profile.threads)}, not a whole number from 1 to {_MOST_THREADS}"
    if profile.one_thread and (
        len(profile.one_thread) != len(sizes) or not all(_is_amount(one) and one > 0 for one in profile.one_thread)
    ):
        return f"one_thread is {_shown(list(profile.one_thread))}, not a factor for each of {len(sizes)} batch sizes"
    if not _is_count(profile.crowd, _MOST_COUNTED):
        return f"crowd is {_shown(profile.crowd)}, not a number of cores"
    if profile.crowded and (len(profile.crowded) != len(sizes) or not all(_is_slowdown(r) for r in profile.crowded)):
        return (
            f"crowded is {_shown(list(profile.crowded))}, not a factor from 1 on for each of {len(sizes)} batch sizes"
        )
    if not _is_share(profile.changes_share):
        return f"changes_share is {_shown(profile.changes_share)}, which is not a share above 0 and up to 1"
    wrong = _coding_problem(profile.coding)
    return wrong or next((wrong for layer in profile.layers if (wrong := _layer_problem(layer, sizes))), None)


def _coding_problem(coding: Mapping[str, CodingTimes]) -> str | None:
    for name, times in coding.items():
        if name not in _CODED:
            return f"coding has times of '{name}', which is none of {', '.join(_CODED)}"
        for key, seconds in asdict(times).items():
            if not _is_amount(seconds):
                return (
                    f"{key} of coding '{name}' is {_shown(seconds)}, which is not a number of seconds from 0 to "
                    f"{LONGEST_S:g}"
                )
    return None


def _layer_problem(layer: LayerProfile, sizes: tuple[int, ...]) -> str | None:
    if not isinstance(layer.name, str):
        return "a layer's name is not text"
    least = layer.least_s or layer.forward_s
    for key, times in (("forward_s", layer.forward_s), ("backward_s", layer.backward_s), ("least_s", least)):
        if len(times) != len(sizes):
            return f"{key} of layer '{layer.name}' is {len(times)} times, not one for each of {len(sizes)} batch sizes"
        for size, seconds in zip(sizes, times, strict=True):
            if not _is_amount(seconds):
                return (
                    f"{key} of layer '{layer.name}' is {_shown(seconds)} at a batch of {size}, not a time from 0 to "
                    f"{LONGEST_S:g} s"
                )
    for key in ("output_bytes", "parameter_bytes", "saved_bytes", "working_bytes", "frozen_bytes"):
        if not _is_count(getattr(layer, key), _MOST_COUNTED):
            given = _shown(getattr(layer, key))
            return f"{key} of layer '{layer.name}' is {given}, not a number of bytes from 0 to {_MOST_COUNTED:.0e}"
    if layer.tensor_bytes and not _are_crossing(layer):
        return (
            f"tensor_bytes of layer '{layer.name}' are {_shown(layer.tensor_bytes)}, not the bytes of up to "
            f"{_MOST_TENSORS} tensors, output_bytes together, and of each one's gradient"
        )
    if layer.frozen_bytes > layer.parameter_bytes:
        return f"layer '{layer.name}' has more frozen_bytes than parameter_bytes"
    for key in ("rectified", "trained"):
        if not isinstance(getattr(layer, key), bool):
            return f"{key} of layer '{layer.name}' is {getattr(layer, key)!r}, not true or false"
    for name, shares in layer.shares.items():
        if name not in _CODED:
            return f"shares of layer '{layer.name}' are of '{name}', which is none of {', '.join(_CODED)}"
        if len(shares) != 2 or not all(_is_share(share) for share in shares):
            return (
                f"shares of '{name}' in layer '{layer.name}' are {list(shares)}, not two numbers above 0 and up to 1: "
                "of activations and of gradients"
            )
    return None


def _are_crossing(layer: LayerProfile) -> bool:
    both = layer.tensor_bytes
    if len(both) > _MOST_TENSORS or not all(
        len(one) == 2 and all(_is_count(n, _MOST_COUNTED) for n in one) for one in both
    ):
        return False
    return all(down in (0, up) for up, down in both) and sum(up for up, _ in both) == layer.output_bytes


def _is_amount(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and bool(0 <= value <= LONGEST_S)


def _is_share(value: Any) -> bool:
    return _is_amount(value) and bool(0 < value <= 1)


def _is_slowdown(value: Any) -> bool:
    return _is_amount(value) and bool(value >= 1)


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _shown(value: Any) -> str:
    """Return a value, shortened: a peer may have sent hundreds of digits."""
    return repr(value)[:80]
