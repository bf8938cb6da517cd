"""What one machine measured about one network: seconds and bytes, layer by layer; paper III-C, phase 1."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pipar.errors import ConfigError

#: Written into every file; a file of another format is refused, not guessed at.
FORMAT = 4


@dataclass(frozen=True)
class LayerProfile:
    """One layer: seconds per batch for each measured batch size, and its sizes.

    `output_bytes` is one sample's output (and so its gradient) at the run's dtype; `parameter_bytes` counts
    parameters and buffers. `least_s` is the quickest forward and backward together, for bounds; empty: the usual ones.
    """

    name: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    output_bytes: int
    parameter_bytes: int
    least_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Profile:
    """The times of a whole network on one machine, single-threaded, and of the work around it.

    The paper measures the full batch only. Times are not proportional to 1/N, so several batch sizes are
    here, and the work that the paper leaves out: loading a sample, raw tensors to wire bytes and back, the
    optimiser by parameter byte, models into bytes and back, aggregation; each but loading with what a call costs
    whatever its size.
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
    backward_at_cut_s: float = 0.0  # what a backward that starts at a cut costs beside its layers
    aggregate_s: float = 0.0
    aggregate_s_per_byte: float = 0.0
    machine: str = ""
    how: str = ""

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise ConfigError(f"The profile of '{self.model}' is not usable: {problem}.")

    def parameter_bytes(self, first: int, last: int) -> int:
        """Return the bytes of parameters and buffers of layers first..last, counted from 1."""
        return sum(layer.parameter_bytes for layer in self.layers[first - 1 : last])

    def output_bytes(self, layer: int) -> int:
        """Return the bytes of one sample's output of a layer, counted from 1."""
        return self.layers[layer - 1].output_bytes

    def save(self, path: Path) -> None:
        """Write the profile as JSON that `load` reads back as the same profile."""
        path.write_text(self.to_json(), "utf-8")

    def to_json(self) -> str:
        """Return one JSON object with sorted keys and a `format` number."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Return the profile of a file, or raise one sentence that names the file."""
        try:
            return cls.from_json(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"Cannot read the profile {path}: {error.strerror}.") from None
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{path} is not a profile that 'pipar profile' wrote: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Return the profile that a JSON object says."""
        try:
            tree = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"it is not valid JSON ({error}).") from None
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise ConfigError(f"its format is not {FORMAT}.")
        values = _only(cls, {key: value for key, value in tree.items() if key != "format"})
        layers = tuple(_layer(layer) for layer in _list(values["layers"], "layers"))
        return cls(**{**values, "layers": layers, "batch_sizes": tuple(_list(values["batch_sizes"], "batch_sizes"))})


def _layer(tree: Any) -> LayerProfile:
    values = _only(LayerProfile, tree)
    times = {key: tuple(_list(values[key], key)) for key in ("forward_s", "backward_s", "least_s")}
    return LayerProfile(**{**values, **times})


def _only(record: type, tree: Any) -> dict[str, Any]:
    """Return the tree if its keys are exactly the record's fields."""
    wanted = {field.name for field in fields(record)}
    given = set(tree) if isinstance(tree, dict) else set()
    if given != wanted:
        wrong = ", ".join(sorted(given ^ wanted))
        raise ConfigError(f"these keys are missing or unknown: {wrong}.")
    return dict(tree)


def _list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{key} is not a list.")
    return value


def _problem(profile: Profile) -> str | None:
    """Return what is wrong with a profile's numbers, if anything is."""
    sizes = profile.batch_sizes
    if not sizes or not all(_is_count(size) and size >= 1 for size in sizes) or list(sizes) != sorted(set(sizes)):
        return "batch_sizes are not whole numbers in ascending order"
    if not profile.layers:
        return "it has no layers"
    for field in fields(profile):
        value = getattr(profile, field.name)
        if field.type == "float" and not _is_amount(value):
            return f"{field.name} is not a number of seconds"
        if field.type == "str" and not isinstance(value, str):
            return f"{field.name} is not text"
    return next((wrong for layer in profile.layers if (wrong := _layer_problem(layer, len(sizes)))), None)


def _layer_problem(layer: LayerProfile, sizes: int) -> str | None:
    if not isinstance(layer.name, str):
        return "a layer's name is not text"
    least = layer.least_s or layer.forward_s
    for key, times in (("forward_s", layer.forward_s), ("backward_s", layer.backward_s), ("least_s", least)):
        if len(times) != sizes or not all(map(_is_amount, times)):
            return f"{key} of layer '{layer.name}' is not one time for each batch size"
    if not (_is_count(layer.output_bytes) and _is_count(layer.parameter_bytes)):
        return f"a size of layer '{layer.name}' is not a number of bytes"
    return None


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
