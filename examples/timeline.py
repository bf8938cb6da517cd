"""Draw part of a run's trace: a row for each lane, a block for each stage.

    python examples/timeline.py runs/NAME/trace.json timeline.svg

A span of trace.json becomes a block; waiting stays empty. `pipar report` draws the same with zoom and more; this is a
small program that shows how to read a trace.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

#: Stages that are drawn: fill, colour of the text, meaning. Colour-blind readers can tell the fills apart.
STAGES = {
    "fc": ("#56b4e9", "#000", "forward on the device"),
    "bc": ("#009e73", "#fff", "backward on the device"),
    "u": ("#e69f00", "#000", "activations up"),
    "fs": ("#0072b2", "#fff", "forward on the server"),
    "bs": ("#cc79a7", "#000", "backward on the server"),
    "d": ("#d55e00", "#fff", "gradients down"),
    "step": ("#5c5c5c", "#fff", "optimiser step"),
    "model": ("#f0e442", "#000", "model on the link"),
    "aggregate": ("#7a3e9d", "#fff", "averaging"),
}
LANES = ("compute", "uplink", "downlink")
_LEFT, _RIGHT, _TOP, _ROW, _BLOCK = 150, 20, 34, 20, 15
_WIDTH = 960
_LEAST_LABEL = 15  # pixels: a narrower block has no room for its name


@dataclass(frozen=True)
class Span:
    """What a lane did; start and end in seconds since the start of the run."""

    owner: str
    lane: str
    kind: str
    name: str
    start: float
    end: float
    epoch: int
    iteration: int
    device: str  # the device that the work was done for

    @property
    def row(self) -> str:
        return f"{self.owner} {self.lane}"


def read_spans(trace: Path) -> list[Span]:
    """Return the stages of a run's trace.json, sorted by start."""
    events: list[dict[str, Any]] = json.loads(trace.read_text("utf-8"))["traceEvents"]
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"] for event in events if event["ph"] == "M"
    }
    spans = []
    for event in events:
        if event["ph"] == "X" and event["cat"] in STAGES:
            process, args = event["pid"], event["args"]
            owner, lane = names["process_name", process, 0], names["thread_name", process, event["tid"]]
            start = event["ts"] / 1e6
            device = args.get("device", owner)
            spans.append(
                Span(owner, lane, event["cat"], event["name"], start, start + event["dur"] / 1e6,
                     args["epoch"], args["iteration"], device)
            )  # fmt: skip
    return sorted(spans, key=lambda span: span.start)


def of_epoch(spans: Sequence[Span], epoch: int) -> list[Span]:
    return [span for span in spans if span.epoch == epoch]


def of_iteration(spans: Sequence[Span], device: str, epoch: int, iteration: int) -> list[Span]:
    """Return the spans of one batch of one device, on its own lanes and on the server's cores."""
    return [span for span in spans if (span.device, span.epoch, span.iteration) == (device, epoch, iteration)]


def picture(spans: Sequence[Span], title: str, seconds: float | None = None) -> str:
    """Return an SVG of the spans; `seconds` is the length of the axis, to draw several pictures on one scale."""
    start = min(span.start for span in spans)
    length = seconds or max(span.end for span in spans) - start
    scale = (_WIDTH - _LEFT - _RIGHT) / length
    rows = _rows(spans)
    height = _TOP + _ROW * len(rows) + 70
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        f'<text x="12" y="21" font-size="14" font-weight="bold" fill="#222222">{escape(title)}</text>',
    ]
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number
        parts.append(f'<text x="12" y="{y + 12}" fill="#222222">{escape(row)}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_BLOCK}" fill="#f1f1f1"/>')
        parts += [_block(span, _LEFT + (span.start - start) * scale, y, scale) for span in spans if span.row == row]
    bottom = _TOP + _ROW * len(rows)
    parts += [*_axis(bottom, length, scale), *_legend(bottom + 38, {span.kind for span in spans}), "</svg>"]
    return "\n".join(parts) + "\n"


def _rows(spans: Sequence[Span]) -> list[str]:
    """Return the lanes that have spans: those of each device, then the server's cores."""

    def place(span: Span) -> tuple[bool, str, int, str]:
        lane = LANES.index(span.lane) if span.lane in LANES else 0
        return span.owner == "server", span.owner, lane, span.lane

    return list(dict.fromkeys(span.row for span in sorted(spans, key=place)))


def _block(span: Span, x: float, y: int, scale: float) -> str:
    width = max((span.end - span.start) * scale, 0.6)
    colour, ink, _ = STAGES[span.kind]
    tip = f"{span.name}: {span.end - span.start:.3f} s"
    block = (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BLOCK}" fill="{colour}" stroke="#ffffff" '
        f'stroke-width="0.5"><title>{escape(tip)}</title></rect>'
    )
    if width < max(_LEAST_LABEL, 6 * len(span.name)):
        return block
    return (
        f'{block}<text x="{x + width / 2:.2f}" y="{y + 11}" font-size="9" text-anchor="middle" fill="{ink}" '
        f'pointer-events="none">{escape(span.name)}</text>'
    )


def _axis(y: int, length: float, scale: float) -> list[str]:
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1e9) if length / step < 9)
    marks = [number * step for number in range(int(length / step) + 1)]
    return [
        f'<text x="{_LEFT + mark * scale:.2f}" y="{y + 12}" text-anchor="middle" fill="#444444">{mark:g} s</text>'
        for mark in marks
    ]


def _legend(y: int, kinds: set[str]) -> list[str]:
    parts = []
    for number, kind in enumerate(kind for kind in STAGES if kind in kinds):
        colour, _, words = STAGES[kind]
        x, line = 12 + 186 * (number % 5), y + 15 * (number // 5)
        parts.append(f'<rect x="{x}" y="{line - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15}" y="{line}" font-size="10" fill="#222222">{escape(words)}</text>')
    return parts


def main(trace: str, output: str) -> None:
    spans = read_spans(Path(trace))
    first = next(span.device for span in spans if span.kind == "fc")
    shown = of_iteration(spans, first, 1, 1)
    Path(output).write_text(picture(shown, f"The first batch of {first}"), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
