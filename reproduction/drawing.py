"""The style of figures: colours for every kind of colour vision, the paper's panels, reproducible files.

matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipar.errors import InputError
from pipar.methods import METHODS
from pipar.settings.config import DATASETS, MODELS
from pipar.settings.links import NAMED_LINKS
from pipar.storage.whole_files import write_atomically
from reproduction.testbed import BOARD, DEVICES, SERVER_SPEED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
Rows = Sequence[Row]

#: The palette of Okabe and Ito: eight colours that can be told apart with every kind of colour vision.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"


@dataclass(frozen=True)
class Look:
    """The style of one series. Hatch, marker and dashes distinguish it in greyscale, too."""

    colour: str
    hatch: str
    marker: str
    dashes: str


LOOKS = {
    "fl": Look(BLUE, "", "o", "-"),
    "sfl": Look(ORANGE, "///", "s", "--"),
    "pipar": Look(GREEN, "...", "^", "-."),
    "sl": Look(PURPLE, "\\\\\\", "D", ":"),
    "sfl2": Look(SKY, "xxx", "v", "--"),
}
_OTHERS = (Look(VERMILLION, "---", "P", "-"), Look(BLACK, "++", "X", ":"), Look(YELLOW, "oo", "*", "-."))

#: Names in the paper.
NAMES = {
    "vgg5": "VGG-5", "resnet18": "ResNet-18", "mobilenetv3_small": "MobileNetV3-Small",
    "vgg16": "VGG-16", "resnet101": "ResNet-101", "mobilenetv3_large": "MobileNetV3-Large",
    "mnist": "MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny_imagenet": "Tiny ImageNet",
    "4g": "4G", "4g+": "4G+", "wifi": "WiFi",
    "fl": "FL", "sl": "SL", "sfl": "SFL", "sfl2": "SFL V2", "pipar": "PiPar",
}  # fmt: skip
_METHOD_ORDER = ("fl", "sl", "sfl", "sfl2", "pipar")
_ORDER = {key: at for at, key in enumerate((*_METHOD_ORDER, *MODELS, *DATASETS, *NAMED_LINKS))}
assert set(_METHOD_ORDER) == set(METHODS)

#: Size of one panel in inches, and of the legend above all panels.
_WIDTH, _HEIGHT, _LEGEND = 3.8, 2.5, 0.5
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # included in matplotlib: the same glyphs on every machine
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.4,
    "svg.fonttype": "path",
    "svg.hashsalt": "pipar",  # names of shapes in a file are random otherwise
}
#: The quantity on most axes, and the size of numbers next to marks.
SECONDS = "training time per epoch (s)"
SMALL_PRINT = 6
#: The label of the paper's values.
PUBLISHED = "as published"
#: The end of a logarithmic axis's label.
LOGARITHMIC = "log scale"
#: Inches of a letter, and of the space before a label of the legend; both are upper estimates.
_LETTER, _HANDLE = 0.065, 0.55


def name_of(key: Any) -> str:
    """Return the paper's name of a network, dataset, link or method; other keys are returned as text."""
    return NAMES.get(key, str(key)) if isinstance(key, str) else f"{key:g}" if isinstance(key, float) else str(key)


def look_of(key: str, among: Sequence[Any]) -> Look:
    """Return the look of a series; those that are not methods get one each, in order."""
    if key in LOOKS:
        return LOOKS[key]
    others = [one for one in among if one not in LOOKS]
    return _OTHERS[others.index(key) % len(_OTHERS)]


def short(value: float) -> str:
    """Return a number with three digits: 1234, 12.3, 0.0123."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def distinct(rows: Rows, key: str) -> list[Any]:
    """Return the values of a column, each once: names in the order of the configuration, numbers by size."""
    found = list(dict.fromkeys(row[key] for row in rows if row.get(key) is not None))
    if all(isinstance(one, int | float) for one in found):
        return sorted(found)
    return sorted(found, key=lambda one: _ORDER.get(one, len(_ORDER)))  # stable: others keep their order


def is_as_in_the_paper(row: Row) -> bool:
    """Return whether a row is of the paper's testbed, so that its printed numbers may be shown next to it."""
    its = {"devices": DEVICES, "wire": "raw", "board": BOARD, "server_speed": SERVER_SPEED}
    return all(row.get(key, value) == value for key, value in its.items())


def having(rows: Rows, *keys: str) -> list[Row]:
    """Return the rows that have all of these columns."""
    return [row for row in rows if all(row.get(key) is not None for key in keys)]


# --- figures and files


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def check_matplotlib() -> None:
    """Raise if matplotlib is not installed."""
    if not can_draw():
        raise InputError("Figures need matplotlib, which is not installed: pip install 'pipar[reproduce]'.")


@contextmanager
def styled() -> Iterator[None]:
    """Draw and save in our style, independent of the user's own settings."""
    check_matplotlib()
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.svg and NAME.png and return their paths; the same figure gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    # By default matplotlib writes the date and its version.
    formats: dict[str, dict[str, Any]] = {
        "svg": {"metadata": {"Date": None, "Creator": "pipar"}},
        "png": {"metadata": {"Software": "pipar"}, "dpi": 160},
    }
    paths = []
    for ending, options in formats.items():
        buffer = BytesIO()
        figure.savefig(buffer, format=ending, **options)
        paths.append(folder / f"{name}.{ending}")
        write_atomically(paths[-1], buffer.getvalue())
    return paths


@dataclass(frozen=True)
class Panel:
    """One picture of a figure, and the rows that it shows."""

    axes: Axes
    rows: list[Row]


def panels(rows: Rows, *, across: str, down: str | None = None) -> tuple[Figure, list[Panel]]:
    """Return a figure with a panel for each value of a column across, and of another down; empty panels are left out.

    Without rows the figure has no panels.
    """
    from matplotlib.figure import Figure

    if not rows:
        return Figure(), []
    columns, lines = distinct(rows, across), distinct(rows, down) if down else [None]
    size = (_WIDTH * len(columns), _HEIGHT * len(lines) + _LEGEND)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(lines), len(columns), squeeze=False)
    found = []
    for line, axes_of_line in zip(lines, grid, strict=True):
        for column, axes in zip(columns, axes_of_line, strict=True):
            own = [row for row in rows if row.get(across) == column and (down is None or row.get(down) == line)]
            if own:
                axes.set_title(_title(own[0], across, down))
                found.append(Panel(axes, own))
            else:
                axes.set_axis_off()
    return figure, found


def _title(row: Row, across: str, down: str | None) -> str:
    """Return "VGG-5 (4G)": the network is always first."""
    keys = sorted((key for key in (down, across) if key is not None), key=lambda key: key != "network")
    first, *rest = (name_of(row[key]) for key in keys)
    return f"{first} ({rest[0]})" if rest else first


def legend(figure: Figure) -> None:
    """Add one legend above all panels, in as many lines as needed."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = sorted(handles, key=_place_in_legend)
    if labels:
        columns = _columns(labels, figure.get_figwidth())
        ordered = [label for column in columns for label in column]
        figure.legend(
            [handles[label] for label in ordered],
            ordered,
            loc="outside upper center",
            ncols=len(columns),
            frameon=False,
        )


def _place_in_legend(label: str) -> int:
    """Return the sort key of an entry: methods first, the paper's values last."""
    return 0 if label in map(name_of, METHODS) else 2 if PUBLISHED in label else 1


def _columns(labels: Sequence[str], inches: float) -> list[Sequence[str]]:
    """Return labels in as many columns as fit side by side; they are read line by line."""
    for count in range(len(labels), 1, -1):
        columns = [labels[at::count] for at in range(count)]
        if sum(_HANDLE + _LETTER * max(map(len, column)) for column in columns) <= inches:
            return columns
    return [labels]


# --- axes


def name_axes(axes: Axes, *, across: str = "", up: str = "") -> None:
    """Label the axes, and mark logarithmic ones."""
    if across:
        axes.set_xlabel(across if axes.get_xscale() == "linear" else f"{across}, {LOGARITHMIC}")
    if up:
        axes.set_ylabel(up if axes.get_yscale() == "linear" else f"{up}\n{LOGARITHMIC}")


def scale_heights(axes: Axes, values: Sequence[float]) -> None:
    """Scale the axis from 0, with room for labels above bars of these heights."""
    if (highest := max(values, default=0.0)) > 0:
        axes.set_ylim(0, 1.3 * highest)
    axes.grid(axis="y", linewidth=0.3, color="0.8")


@dataclass(frozen=True)
class Places:
    """Positions of bars: groups around 0, 1, 2, ..., and in each the series side by side."""

    groups: Sequence[Any]
    series: Sequence[Any]

    @property
    def width(self) -> float:
        """The width of one bar."""
        return 0.8 / len(self.series)

    def at(self, group: Any, one: Any) -> float:
        """Return the middle of the bar of a group and a series."""
        return self.groups.index(group) + self.width * (self.series.index(one) - (len(self.series) - 1) / 2)

    def beside(self, group: Any, one: Any) -> float:
        """Return the position of a mark that belongs to a bar: to its right, away from the number above it."""
        return self.at(group, one) + self.width / 2 + 0.06


def filled(look: Look) -> dict[str, Any]:
    """Return how matplotlib fills a bar of this look."""
    return {"color": look.colour, "hatch": look.hatch, "edgecolor": "white", "linewidth": 0}


def mark_published(axes: Axes, across: Sequence[float], up: Sequence[float], label: str) -> None:
    """Mark the values that the paper prints."""
    if across:
        axes.plot(
            across, up, linestyle="none", marker="D", markersize=4, markerfacecolor="white", markeredgecolor=BLACK,
            label=label,
        )  # fmt: skip


def name_groups(axes: Axes, groups: Sequence[Any]) -> None:
    """Write the groups' names below their bars."""
    axes.set_xticks(range(len(groups)), [name_of(group) for group in groups])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(groups) - 0.5)
