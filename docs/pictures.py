"""Draw the timelines of the documents from traces of the current programs.

    python -m docs.pictures

Two boards and a server in virtual time, timing-only: the pictures are the same on every machine, and a test compares
them with those in docs/images.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pipar
from examples.timeline import Span, of_epoch, of_iteration, picture, read_spans

IMAGES = Path(__file__).parent / "images"
#: All cut after layer 2, so that only the order of work differs; each board has two batches per epoch.
SETTINGS = {
    "run": {"epochs": 1, "batch_size": 100},
    "data": {"name": "cifar10", "samples_per_device": 200},
    "plan": {"split_point": 2, "micro_batches": 4, "replan": False},
    "wire": {"encoding": "raw"},
    "server": {"profile": "i7-11850h", "cores": 1},
    "devices": [{"name": "board", "count": 2, "profile": "raspberry-pi-3b", "link": "wifi"}],
}
TITLES = {
    "fl": "fl: each board trains the whole network, then its model travels",
    "sl": "sl: one board after the other; each waits for the server",
    "sfl": "sfl: both at the same time, but a board waits until its batch comes back",
    "pipar": "pipar: each batch in four micro-batches, which compute and travel at the same time",
}


def epochs() -> dict[str, list[Span]]:
    """Return the first epoch of the same training with each method."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PIPAR_RUNS"] = folder
        results = pipar.compare(SETTINGS, methods=list(TITLES), world="timing-only", programs=True)
        return {method: of_epoch(read_spans(result.folder / "trace.json"), 1) for method, result in results.items()}


def pictures() -> dict[str, str]:
    """Return the SVG of each method, all on one time scale, and of a single batch."""
    drawn = epochs()
    longest = max(spans[-1].end - spans[0].start for spans in drawn.values())
    batch = of_iteration(drawn["pipar"], "board-1", 1, 2)
    return {method: picture(spans, TITLES[method], longest) for method, spans in drawn.items()} | {
        "batch": picture(batch, "One batch of board-1 with pipar")
    }


if __name__ == "__main__":
    for name, svg in pictures().items():
        (IMAGES / f"timeline-{name}.svg").write_text(svg, "utf-8")
