"""The cost of privacy drawn as in the paper: a panel per network, a group per link, a bar per method.

The overheads are on top of the bars, and again below on a logarithmic scale: most are too small to be visible next to
an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Protocol

#: Text and colour of each mode. Colour-blind readers can tell the colours apart.
_MODES = {
    "without": ("without privacy", "#8fb8de"),
    "classic": ("classic DP on top", "#d55e00"),
    "pixel": ("PixelDP on top", "#222222"),
}
_OVERHEADS = ("classic", "pixel")
_WIDTH, _LEFT, _PANEL, _GAP = 960, 50, 270, 36
_TOP, _HEIGHT = 62, 190
_BELOW, _SMALL = 300, 120
_BAR, _BETWEEN = 24, 3
_INK = "#222222"


class Bar(Protocol):
    """The seconds per epoch of one network, link and method, by mode."""

    @property
    def network(self) -> str: ...
    @property
    def link(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def seconds(self) -> Mapping[str, float]: ...


def picture(cells: Sequence[Bar], networks: Mapping[str, str]) -> str:
    """Return the SVG; `networks` are the panels by name, with their titles."""
    height = _BELOW + _SMALL + 44
    title = "Seconds of an epoch with and without differential privacy"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        _text(12, 20, title, size=14, weight="bold"),
        *_legend(),
        _text(12, _TOP - 6, "s", size=10),
        _text(12, _BELOW - 8, "overhead, s", size=10),
    ]
    for number, (network, name) in enumerate(networks.items()):
        x = _LEFT + number * (_PANEL + _GAP)
        parts += _panel(x, name, [cell for cell in cells if cell.network == network])
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(x: int, name: str, cells: Sequence[Bar]) -> Iterator[str]:
    links = list(dict.fromkeys(cell.link for cell in cells))
    methods = list(dict.fromkeys(cell.method for cell in cells))
    yield _text(x + _PANEL / 2, _TOP - 8, name, size=12, anchor="middle", weight="bold")
    most = max(sum_of(cell) for cell in cells)
    step = round_step(most)
    scale = _HEIGHT / (step * math.ceil(most / step))
    yield from _grid(
        x, [(_TOP + _HEIGHT - n * step * scale, f"{n * step:g}") for n in range(math.ceil(most / step) + 1)]
    )
    low, high = decades(cells)
    decade = _SMALL / (high - low)
    yield from _grid(x, [(_BELOW + _SMALL - (n - low) * decade, f"{10.0**n:g}") for n in range(low, high + 1)])
    group = _PANEL / len(links)
    for cell in cells:
        inset = (group - len(methods) * (_BAR + _BETWEEN)) / 2
        at = x + links.index(cell.link) * group + inset + methods.index(cell.method) * (_BAR + _BETWEEN)
        yield from _stack(at, cell, scale)
        yield from _overheads(at, cell, low, decade)
    for number, link in enumerate(links):
        for bottom in (_TOP + _HEIGHT, _BELOW + _SMALL):
            yield _text(x + (number + 0.5) * group, bottom + 26, link, anchor="middle")


def _stack(x: float, cell: Bar, scale: float) -> Iterator[str]:
    y: float = _TOP + _HEIGHT
    for mode in _MODES:
        seconds = cell.seconds[mode] if mode == "without" else overhead_s(cell, mode)
        height = max(seconds, 0.0) * scale
        y -= height
        yield _rect(x, y, _BAR, height, mode, f"{cell.method} on {cell.link}: {seconds:.3f} s {_MODES[mode][0]}")
    yield _text(x + _BAR / 2, _TOP + _HEIGHT + 12, cell.method, size=9, anchor="middle")


def _overheads(x: float, cell: Bar, low: int, decade: float) -> Iterator[str]:
    width = _BAR / len(_OVERHEADS)
    for number, mode in enumerate(_OVERHEADS):
        seconds = overhead_s(cell, mode)
        height = (math.log10(seconds) - low) * decade if seconds > 10.0**low else 0.0
        tip = f"{cell.method} on {cell.link}: {seconds:.3f} s {_MODES[mode][0]}"
        yield _rect(x + number * width, _BELOW + _SMALL - height, width - 1, height, mode, tip)
    yield _text(x + _BAR / 2, _BELOW + _SMALL + 12, cell.method, size=9, anchor="middle")


def overhead_s(cell: Bar, mode: str) -> float:
    """Return the seconds that a mode adds to an epoch."""
    return cell.seconds[mode] - cell.seconds["without"]


def sum_of(cell: Bar) -> float:
    """Return the height of a stacked bar in seconds."""
    return cell.seconds["without"] + sum(max(0.0, overhead_s(cell, mode)) for mode in _OVERHEADS)


def decades(cells: Sequence[Bar]) -> tuple[int, int]:
    """Return the powers of ten that enclose all overheads; those below a millisecond are not drawn."""
    found = [seconds for cell in cells for mode in _OVERHEADS if (seconds := overhead_s(cell, mode)) > 1e-3]
    low, high = math.floor(math.log10(min(found, default=0.1))), math.ceil(math.log10(max(found, default=1.0)))
    return low, max(high, low + 1)


def round_step(most: float) -> float:
    """Return the smallest of 1, 2, 5, 10, ... times a power of ten for which at most five steps are needed."""
    power = 10.0 ** math.floor(math.log10(most / 5))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power * 5 >= most * (1 - 1e-9))


def _grid(x: int, lines: Sequence[tuple[float, str]]) -> Iterator[str]:
    for y, label in lines:
        yield f'<line x1="{x}" x2="{x + _PANEL}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
        yield _text(x - 4, y + 3, label, size=9, anchor="end")


def _legend() -> Iterator[str]:
    for number, (words, colour) in enumerate(_MODES.values()):
        x = _WIDTH - 420 + 140 * number
        yield f'<rect x="{x}" y="11" width="10" height="10" fill="{colour}"/>'
        yield _text(x + 15, 20, words)


def _rect(x: float, y: float, width: float, height: float, mode: str, tip: str) -> str:
    size = f'x="{x:.1f}" y="{y:.2f}" width="{width:.1f}" height="{height:.2f}"'
    return f'<rect {size} fill="{_MODES[mode][1]}"><title>{escape(tip)}</title></rect>'


def _text(x: float, y: float, words: str, *, size: int = 11, anchor: str = "start", weight: str = "normal") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{_INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
