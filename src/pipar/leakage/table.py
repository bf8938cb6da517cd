"""The leakage of each cut of a network, as `pipar leakage` measured it: its file, and tables for reading.

It needs no torch, because planning uses it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pipar.errors import ConfigError
from pipar.json_records import list_of, object_of, only_fields, read_fields
from pipar.settings.config import Config

FORMAT = 1
#: A larger PSNR is recorded as this: the images cannot be told apart.
MAX_DB = 100.0
_MEASURE = "Measure it with 'pipar leakage'."


@dataclass(frozen=True)
class RebuildQuality:
    """How similar the rebuilt images are to the inputs, averaged over the images.

    `pixel_correlation` is Pearson's over the pixels of an image; `psnr_db` is the peak signal-to-noise ratio.
    """

    pixel_correlation: float
    psnr_db: float


@dataclass(frozen=True)
class CutLeakage:
    """What the activations after layer P reveal about the inputs: by their correlation, and to each attack."""

    split_point: int
    distance_correlation: float
    attacks: Mapping[str, RebuildQuality]

    @property
    def strongest(self) -> str:
        """The attack with the highest pixel correlation."""
        return max(self.attacks, key=lambda name: self.attacks[name].pixel_correlation)

    @property
    def leakage(self) -> float:
        """The pixel correlation of the strongest attack, at least 0; `privacy.max_leakage` limits it."""
        return max(0.0, self.attacks[self.strongest].pixel_correlation)


@dataclass(frozen=True)
class Subject:
    """The network and data of a measurement. `norm` is "" for a user's own network."""

    model: str
    norm: str
    dataset: str
    input_shape: tuple[int, ...]

    @classmethod
    def of(cls, config: Config, model: str, dataset: str, input_shape: Sequence[int]) -> Subject:
        """Return the subject of a training of this network on this data."""
        return cls(model, config.model.norm if model == config.model.name else "", dataset, tuple(input_shape))

    def __str__(self) -> str:
        norm = f" (norm {self.norm})" if self.norm else ""
        return f"{self.model}{norm} on {self.dataset} with samples of {'x'.join(map(str, self.input_shape))}"


@dataclass(frozen=True)
class LeakageTable:
    """All measurements of one network, and how they were made.

    `layers` are the names of all Q layers; P = Q has no entry in `cuts`, because no activations leave the device there.
    `guess` is the pixel correlation of the mean of other images: a guess without any activation.
    """

    model: str
    norm: str
    dataset: str
    input_shape: tuple[int, ...]
    layers: tuple[str, ...]
    seed: int
    weights: str  # in words: initial weights, or their file
    pixel_scale: float  # standard deviation of the noise on the inputs
    images: int  # number attacked
    compared: int  # number of samples for the distance correlation
    others: int  # number of the attacker's images of the same kind
    guess: float
    attacks: Mapping[str, str]  # description of each attack, with its budget
    cuts: tuple[CutLeakage, ...]

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise ConfigError(f"{problem}.")

    @property
    def subject(self) -> Subject:
        return Subject(self.model, self.norm, self.dataset, self.input_shape)

    @property
    def leakage(self) -> dict[int, float]:
        """The leakage of each measured cut, by split point."""
        return {cut.split_point: cut.leakage for cut in self.cuts}

    def to_json(self) -> str:
        """Return one JSON object that `from_json` reads back."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> LeakageTable:
        """Return the table in a file; an error names the file."""
        try:
            return cls.from_json(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"Cannot read the leakage file {path}: {error.strerror}. {_MEASURE}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not a file that 'pipar leakage' wrote: it is not text. {_MEASURE}") from None
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{path} is not a file that 'pipar leakage' wrote: {error} {_MEASURE}") from None

    @classmethod
    def from_json(cls, text: str) -> LeakageTable:
        """Return the table that a JSON object describes."""
        values = read_fields(cls, text, FORMAT)
        lists = {key: tuple(list_of(values[key], key)) for key in ("input_shape", "layers")}
        cuts = tuple(_cut(cut) for cut in list_of(values["cuts"], "cuts"))
        return cls(**{**values, **lists, "cuts": cuts, "attacks": object_of(values["attacks"], "attacks")})


# --- reading the file


def _cut(tree: Any) -> CutLeakage:
    values = only_fields(CutLeakage, tree)
    attacks = {
        name: RebuildQuality(**only_fields(RebuildQuality, one))
        for name, one in object_of(values["attacks"], "attacks").items()
    }
    return CutLeakage(**{**values, "attacks": attacks})


def _problem(table: LeakageTable) -> str | None:
    """Return what is wrong with a table's values; None if nothing is."""
    for one in fields(table):
        value = getattr(table, one.name)
        if one.type == "str" and not isinstance(value, str):
            return f"{one.name} is not text"
        if one.type == "int" and not _is_count(value):
            return f"{one.name} is {value!r}, not a whole number of at least 0"
    if not table.layers or not all(isinstance(name, str) for name in table.layers):
        return "layers are not the names of a network's layers"
    if not table.input_shape or not all(_is_count(side) and side >= 1 for side in table.input_shape):
        return "input_shape is not the shape of a sample"
    if not all(isinstance(words, str) for words in table.attacks.values()):
        return "attacks are not described by text"
    if not _is_within(table.pixel_scale, 0, float("inf")):
        return f"pixel_scale is {table.pixel_scale!r}, not a number of at least 0"
    if not _is_within(table.guess, -1, 1):
        return f"guess is {table.guess!r}, not a number from -1 to 1"
    return _cuts_problem(table)


def _cuts_problem(table: LeakageTable) -> str | None:
    points, most = [cut.split_point for cut in table.cuts], len(table.layers) - 1
    if not all(_is_count(p) and 1 <= p <= most for p in points) or points != sorted(set(points)):
        return f"the split points of its cuts are {points}, not numbers from 1 to {most} in ascending order"
    for cut in table.cuts:
        where = f"of the cut at P={cut.split_point}"
        if not cut.attacks or cut.attacks.keys() != table.attacks.keys():
            here, all_of_them = (", ".join(attacks) or "none" for attacks in (cut.attacks, table.attacks))
            return f"the attacks {where} are {here}, but those of the table are {all_of_them}"
        if not _is_within(cut.distance_correlation, 0, 1):
            return f"distance_correlation {where} is {cut.distance_correlation!r}, not a number from 0 to 1"
        for name, rebuilt in cut.attacks.items():
            if not _is_within(rebuilt.pixel_correlation, -1, 1):
                given = rebuilt.pixel_correlation
                return f"pixel_correlation of {name} {where} is {given!r}, not a number from -1 to 1"
            if not _is_within(rebuilt.psnr_db, -MAX_DB, MAX_DB):
                return (
                    f"psnr_db of {name} {where} is {rebuilt.psnr_db!r}, not a number from -{MAX_DB:g} to {MAX_DB:g} dB"
                )
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_within(value: Any, low: float, high: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and bool(low <= value <= high) and value != float("inf")


# --- tables for reading


def as_rows(table: LeakageTable) -> list[list[str]]:
    """Return titles and a row for each cut: its layer, distance correlation, and each attack's result."""
    titles = ["P", "layer", "distance correlation"]
    for name in table.attacks:
        titles += [f"{name}: pixel correlation", f"{name}: PSNR dB"]
    return [titles, *(_row(table, cut) for cut in table.cuts)]


def _row(table: LeakageTable, cut: CutLeakage) -> list[str]:
    cells = [str(cut.split_point), table.layers[cut.split_point - 1], f"{cut.distance_correlation:.3f}"]
    for name in table.attacks:
        cells += [f"{cut.attacks[name].pixel_correlation:.3f}", f"{cut.attacks[name].psnr_db:.1f}"]
    return cells


def as_csv(table: LeakageTable) -> str:
    """Return the rows as comma-separated values."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(as_rows(table))
    return text.getvalue()


def as_markdown(table: LeakageTable) -> str:
    """Return the rows as a Markdown table, with the conditions of the measurement."""
    titles, *rows = as_rows(table)
    under = ["---:", "---", *["---:"] * (len(titles) - 2)]
    cells = [f"| {' | '.join(row)} |" for row in (titles, under, *rows)]
    first, *attacks, guess = how_lines(table)
    lines = [f"# {table.subject}", "", first, "", *attacks, "", guess, "", *cells, "", last_line(table)]
    return "\n".join(lines) + "\n"


def how_lines(table: LeakageTable) -> list[str]:
    """Return the conditions of the measurement: weights, number of images, attacks."""
    noise = f", with noise of {table.pixel_scale:g} on the inputs" if table.pixel_scale else ""
    return [
        f"Weights: {table.weights}{noise}. {table.images} images attacked, seed {table.seed}; the distance correlation "
        f"is of {table.compared}.",
        *(f"- {name}: {words}." for name, words in table.attacks.items()),
        f"Without any activation, the mean of {table.others} other images has a correlation of {table.guess:.3f}.",
    ]


def last_line(table: LeakageTable) -> str:
    """Return the caveats of the numbers."""
    return (
        f"At P={len(table.layers)} no activations leave. A low number says that these attacks failed with this budget, "
        "not that a cut is safe."
    )
