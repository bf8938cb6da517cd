"""Memory and open files over time, drawn as two panels of lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from benchmarks.privacy_picture import round_step
from simulation.resources import Sample

#: Colours that colour-blind readers can tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#222222", "#009e73", "#cc79a7")
_WIDTH, _LEFT, _RIGHT, _TOP, _HEIGHT, _GAP = 760, 60, 24, 72, 150, 46
_INK = "#222222"
_PANELS: tuple[tuple[str, Callable[[Sample], float]], ...] = (
    ("resident memory, MiB", lambda one: one.rss_bytes / 2**20),
    ("open files", lambda one: float(one.open_files)),
)


def picture(title: str, unit: str, series: Mapping[str, Sequence[Sample]]) -> str:
    """Return the SVG; `unit` is that of the horizontal axis."""
    height = _TOP + len(_PANELS) * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        _text(12, 20, title, size=14, weight="bold"),
        *_legend(list(series)),
    ]
    for number, (label, value) in enumerate(_PANELS):
        parts += _panel(_TOP + number * (_HEIGHT + _GAP), label, unit, value, series)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    top: int, label: str, unit: str, value: Callable[[Sample], float], series: Mapping[str, Sequence[Sample]]
) -> Iterator[str]:
    points = [one for samples in series.values() for one in samples]
    most_x, most_y = max(one.at for one in points), max(value(one) for one in points)
    step = round_step(most_y)
    lines = math.ceil(most_y / step)
    scale_x, scale_y = (_WIDTH - _LEFT - _RIGHT) / most_x, _HEIGHT / (lines * step)
    bottom = top + _HEIGHT
    yield _text(12, top - 6, label)
    for number in range(lines + 1):
        y = bottom - number * step * scale_y
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
        yield _text(_LEFT - 4, y + 3, f"{number * step:g}", size=9, anchor="end")
    step_x = round_step(most_x)
    for number in range(int(most_x / step_x) + 1):
        at = number * step_x
        yield _text(_LEFT + at * scale_x, bottom + 14, f"{at:g} {unit}", size=9, anchor="middle")
    for colour, samples in zip(_COLOURS, series.values(), strict=False):
        places = " ".join(f"{_LEFT + one.at * scale_x:.1f},{bottom - value(one) * scale_y:.1f}" for one in samples)
        yield f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _legend(names: Sequence[str]) -> Iterator[str]:
    for number, (name, colour) in enumerate(zip(names, _COLOURS, strict=False)):
        x = _LEFT + 150 * number
        yield f'<rect x="{x}" y="28" width="10" height="10" fill="{colour}"/>'
        yield _text(x + 15, 37, name)


def _text(x: float, y: float, words: str, *, size: int = 11, anchor: str = "start", weight: str = "normal") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{_INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
