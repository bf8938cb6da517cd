"""A timeline of one iteration in characters: a row per lane, a column per interval of time.

    device   1>>>2>>>3>>>············1<<<<2<<<<3<<<<=
    uplink   ····1^^^^^2^^^^^3^^^^^··················
    server   ··········1#····2#····3#·················
    downlink ············1vvv··2vvv··3vvv·············
             |---------|---------|---------|---------
             0 s       0.5       1         1.5

If tensors are encoded, there is one more row, for the device's thread that does it.

A block begins with the number of its micro-batch if there is room. Where many stages are shorter than a column, each
kind gets as many columns of the lane as its share of the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from pipar.execution.spans import COMPUTE, CORE, DOWNLINK, IO, UPLINK, Span

#: By kind of stage: the character that fills its blocks, its name, its style.
_KINDS = {
    "fc": (">", "forward", "black on cyan"),
    "bc": ("<", "backward", "black on green"),
    "encode": ("e", "encoding", "black on white"),
    "u": ("^", "upload", "black on yellow"),
    "fs": ("#", "server", "white on blue"),
    "d": ("v", "download", "black on magenta"),
    "decode": ("d", "decoding", "black on white"),
    "step": ("=", "step", "black on white"),
    "protect": ("~", "noise", "black on white"),
    "model": ("m", "model", "black on red"),
    "aggregate": ("+", "averaging", "white on blue"),
}
_CODING = {"encode", "decode"}
_NOTHING = "·"
#: A device encodes and decodes on a thread of its own; the server's coding is part of its stages.
_LANES = {COMPUTE: "device", IO: "coding", UPLINK: "uplink", CORE: "server", DOWNLINK: "downlink"}
_LABEL = 9
_WIDEST = 120
#: Blocks are at least a column wide; a lane that this makes busier by more columns than this is drawn by shares.
_TOO_BUSY = 5
#: Least number of columns between two marks of the axis.
_APART = 10


@dataclass(frozen=True)
class Block:
    """The columns from `first` up to, but excluding, `end` in the row of a lane."""

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
    """Return the blocks of the spans on the lanes; together they reach from column 0 to `columns`.

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
    """Return the start of the first span, and the number of columns per second."""
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    return start, columns / (end - start) if end > start else 0.0


@dataclass(frozen=True)
class Chart:
    """The spans of one iteration, as wide as the terminal, up to 120 columns."""

    spans: Sequence[Span]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = max(_APART, min(options.max_width, _WIDEST) - _LABEL - 1)
        shown = _shown(self.spans)
        start, second = _scale(shown, columns)
        if sum(span.end - span.start for span in shown if span.lane == IO) * second < 1:  # as without encodings
            shown = [span for span in shown if span.lane != IO]
        by_share = False
        for lane, title in _LANES.items():
            spans = [span for span in shown if span.lane == lane]
            if lane == IO and not spans:
                continue
            cells = _block_cells(block for block in blocks(shown, columns) if block.lane == lane)
            if len(cells) > sum(span.end - span.start for span in spans) * second + _TOO_BUSY:
                cells, by_share = _share_cells(spans, start, second, columns), True
            yield Text(title.ljust(_LABEL)) + _row(cells, columns)
        seconds = max(span.end for span in shown) - start
        yield from (Text(" " * _LABEL + line, style="dim") for line in axis(columns, seconds))
        kinds = {span.kind for span in shown}
        yield Text(" " * _LABEL) + Text("  ").join([*_legend(kinds - _CODING), Text(f"{_NOTHING} idle")])
        if kinds & _CODING:
            yield Text(" " * _LABEL) + Text("  ").join(_legend(kinds & _CODING))
        if by_share:
            words = "Stages shorter than a column are shown by their share of the time."
            yield Text(" " * _LABEL + words, style="dim")


#: The busy columns in the row of a lane: a character and its style.
Cells = dict[int, tuple[str, str]]


def _block_cells(of_lane: Iterable[Block]) -> Cells:
    cells: Cells = {}
    # Short blocks last: one that is drawn wider than it is must stay visible; of two short ones, the step.
    for block in sorted(of_lane, key=lambda block: (block.first - block.end, block.kind != "step")):
        for column, sign in enumerate(block.text, start=block.first):
            cells[column] = (sign, _KINDS[block.kind][2])
    return cells


def _share_cells(of_lane: Sequence[Span], start: float, second: float, columns: int) -> Cells:
    """Return columns of each kind in proportion to its time, at places where it is busy, at least one.

    From left to right, a column is marked busy when half a column of busy time has accumulated.
    """
    busy = _busy_shares(of_lane, start, second, columns)
    left: dict[str, float] = {}
    kinds: dict[int, str] = {}
    for column, here in enumerate(busy):
        for kind, share in here.items():
            left[kind] = left.get(kind, 0.0) + share
        if here and sum(left.values()) >= 0.5:
            kinds[column] = max(here, key=lambda kind: left[kind])
            left[kinds[column]] -= 1.0
    for kind in left.keys() - set(kinds.values()):
        kinds[max(range(columns), key=lambda column: busy[column].get(kind, 0.0))] = kind
    return {column: (_KINDS[kind][0], _KINDS[kind][2]) for column, kind in kinds.items()}


def _busy_shares(of_lane: Sequence[Span], start: float, second: float, columns: int) -> list[dict[str, float]]:
    """Return for each column the share of it that each kind of stage takes."""
    busy: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in of_lane:
        begin, end = (span.start - start) * second, (span.end - start) * second
        for column in range(min(int(begin), columns - 1), min(columns, max(int(begin) + 1, math.ceil(end)))):
            share = max(0.0, min(end, column + 1) - max(begin, column))
            busy[column][span.kind] = busy[column].get(span.kind, 0.0) + share
    return busy


def _row(busy: Cells, columns: int) -> Text:
    cells = [busy.get(column, (_NOTHING, "dim")) for column in range(columns)]
    runs = groupby(cells, key=lambda cell: cell[1])
    return Text.assemble(*(("".join(sign for sign, _ in run), style) for style, run in runs))


def axis(columns: int, seconds: float) -> tuple[str, str]:
    """Return a ruler, and the seconds at its marks, which are round numbers."""
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


def _legend(kinds: set[str]) -> list[Text]:
    return [Text.assemble((sign, style), f" {name}") for kind, (sign, name, style) in _KINDS.items() if kind in kinds]
