"""One iteration as a picture of characters: a row for each lane, a column for each stretch of time.

    device   1>>>2>>>3>>>············1<<<<2<<<<3<<<<=
    uplink   ····1^^^^^2^^^^^3^^^^^··················
    server   ··········1#····2#····3#·················
    downlink ············1vvv··2vvv··3vvv·············
             |---------|---------|---------|---------
             0 s       0.5       1         1.5

A block begins with the number of its micro-batch where that leaves room for what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from pipar.trace import COMPUTE, CORE, DOWNLINK, UPLINK, Span

#: What fills a block, in words, and its style.
_KINDS = {
    "fc": (">", "forward", "black on cyan"),
    "bc": ("<", "backward", "black on green"),
    "u": ("^", "upload", "black on yellow"),
    "fs": ("#", "server", "white on blue"),
    "d": ("v", "download", "black on magenta"),
    "step": ("=", "step", "black on white"),
}
_NOTHING = "·"
_LANES = {COMPUTE: "device", UPLINK: "uplink", CORE: "server", DOWNLINK: "downlink"}
_LABEL = 9
_WIDEST = 120
#: Columns from one mark of the axis to the next, at least.
_APART = 10


@dataclass(frozen=True)
class Block:
    """Cells `first` up to, but not with, `end` of a lane's row."""

    lane: str
    kind: str
    micro_batch: int
    first: int
    end: int

    @property
    def text(self) -> str:
        number, width = str(self.micro_batch or ""), self.end - self.first
        filling = _KINDS[self.kind][0]
        return number + filling * (width - len(number)) if len(number) < width else filling * width


def blocks(spans: Iterable[Span], columns: int) -> list[Block]:
    """Return the blocks of the spans on the four lanes, the first of them at column 0; `columns` is their last's end.

    A block starts and ends at the columns nearest to its times, and is at least one column wide.
    """
    shown = _shown(spans)
    start, second = _scale(shown, columns)
    made = []
    for span in shown:
        first = min(round((span.start - start) * second), columns - 1)
        end = max(first + 1, round((span.end - start) * second))
        made.append(Block(span.lane, span.kind, span.micro_batch, first, end))
    return made


def _shown(spans: Iterable[Span]) -> list[Span]:
    return [span for span in spans if span.lane in _LANES and span.kind in _KINDS]


def _scale(spans: Sequence[Span], columns: int) -> tuple[float, float]:
    """Return when the first span starts, and how many columns a second has."""
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    return start, columns / (end - start) if end > start else 0.0


@dataclass(frozen=True)
class Chart:
    """Spans of one iteration, drawn as wide as the terminal, up to 120 columns."""

    spans: Sequence[Span]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = max(_APART, min(options.max_width, _WIDEST) - _LABEL - 1)
        made = blocks(self.spans, columns)
        for lane, title in _LANES.items():
            yield Text(title.ljust(_LABEL)) + _row([block for block in made if block.lane == lane], columns)
        seconds = max(span.end for span in _shown(self.spans)) - min(span.start for span in _shown(self.spans))
        yield from (Text(" " * _LABEL + line, style="dim") for line in axis(columns, seconds))
        yield Text(" " * _LABEL) + _legend({block.kind for block in made})


def _row(of_lane: Iterable[Block], columns: int) -> Text:
    cells: list[tuple[str, str]] = [(_NOTHING, "dim")] * columns
    # The short last: one that is drawn wider than it is must not hide behind its neighbour; of two, not the step.
    for block in sorted(of_lane, key=lambda block: (block.first - block.end, block.kind != "step")):
        for column, sign in enumerate(block.text, start=block.first):
            cells[column] = (sign, _KINDS[block.kind][2])
    runs = groupby(cells, key=lambda cell: cell[1])
    return Text.assemble(*(("".join(sign for sign, _ in run), style) for style, run in runs))


def axis(columns: int, seconds: float) -> tuple[str, str]:
    """Return a ruler and the seconds at its marks, which are round numbers."""
    ruler, labels = ["-"] * columns, [" "] * columns
    step = _round_up(seconds * _APART / columns) if seconds else 0.0
    marks = int(seconds / step * (1 + 1e-9)) if step else 0
    for number in range(marks + 1):
        at = round(number * step / seconds * columns) if number else 0
        if at < columns:
            ruler[at] = "|"
            label = f"{number * step:.6g}" if number else "0 s"
            if at + len(label) <= columns:
                labels[at : at + len(label)] = label
    return "".join(ruler), "".join(labels).rstrip()


def _round_up(seconds: float) -> float:
    """Return the next of 1, 2, 5, 10, ... times a power of ten."""
    power = 10.0 ** math.floor(math.log10(seconds))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= seconds * (1 - 1e-9))


def _legend(kinds: set[str]) -> Text:
    words = [Text.assemble((sign, style), f" {name}") for kind, (sign, name, style) in _KINDS.items() if kind in kinds]
    return Text("  ").join([*words, Text(f"{_NOTHING} idle")])
