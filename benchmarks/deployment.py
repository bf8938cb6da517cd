"""Real deployments in network namespaces: everything "auto" against the best fixed choice, and the pipeline's links.

    python -m benchmarks deployment                       the whole table
    python -m benchmarks.deployment_cell --link 10/25     one training (its docstring shows more)

Server and devices are real processes with mTLS, on this machine's cores, over links that the kernel shapes. Fixed
choices train three epochs, of which the last two count; "auto" trains seven. Trainings alternate; after the first
repetition, fixed choices that took 15 % longer than the best are left out. The environment limits what is measured:
PIPAR_DEPLOYMENT_CELLS (as in "2:10/25 4:unlimited", or "none"), PIPAR_DEPLOYMENT_REPEATS (3) and
PIPAR_DEPLOYMENT_PARTS (as in "table steady wire").
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.deployment_cell import Cell, Choice, Outcome, end_like_ctrl_c, make_certificates, names, train
from benchmarks.plain_stream import carried_bps
from benchmarks.record import Claim
from benchmarks.shaped_namespaces import ShapedLink

_CELLS = os.environ.get("PIPAR_DEPLOYMENT_CELLS", "2:10/25 2:50/50 2:1/5 2:unlimited 4:10/25 4:50/50 4:1/5 4:unlimited")
_REPEATS = int(os.environ.get("PIPAR_DEPLOYMENT_REPEATS", "3"))
_PARTS = os.environ.get("PIPAR_DEPLOYMENT_PARTS", "table steady wire").split()
_DATA = "cifar10" if os.environ.get("PIPAR_DATA") else "synthetic"
_AUTO = Choice()
_FIXED = (
    Choice("fl"),
    Choice("sfl"),
    *(Choice("pipar", p, n, encoding) for p, n in ((1, 4), (1, 8), (2, 4), (3, 4)) for encoding in ("auto", "raw")),
)
#: Names of fewer devices are the first of these.
_MOST_DEVICES = 9
_AUTO_EPOCHS, _FIXED_EPOCHS, _STEADY_EPOCHS = 7, 3, 30
#: A fixed choice that took this much longer than the best once is not measured again.
_HOPELESS = 1.15
#: Tensor bytes of a sample that cross the cut P=1 in each direction, and of its label: VGG-5 on 32 x 32 pixels.
_SAMPLE_BYTES, _LABEL_BYTES = 32 * 16 * 16 * 4, 8
_SAMPLES = 500
#: Fixed choices whose activations need more than this of the link are not measured: fl is far faster there.
_LONGEST_EPOCH_S = 20.0


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    end_like_ctrl_c()
    runs = _Runs(folder)
    claims: list[Claim] = []
    details: dict[str, object] = {}
    for part, measured in (("table", _table), ("steady", _steady), ("wire", _wire)):
        if part in _PARTS:
            found, details[part] = measured(runs)
            claims += found
    return claims, details


class _Runs:
    """Trains cells one after another, each in a folder of its own, with the same certificates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._certs = make_certificates(folder, names(Cell(_MOST_DEVICES, ShapedLink())))
        self._count = 0

    def train(self, cell: Cell) -> Outcome:
        self._count += 1
        outcome = train(replace(cell, data=_DATA), self._folder / str(self._count), self._certs)
        seconds = " ".join(f"{epoch:.2f}" for epoch in outcome.seconds)
        print(f"  {cell.devices} devices, {cell.link}, {cell.choice}: {seconds} s", flush=True)
        return outcome


# --- "auto" against the best fixed choice


def _table(runs: _Runs) -> tuple[list[Claim], object]:
    claims, rows = [], {}
    for text in [] if _CELLS == "none" else _CELLS.split():
        devices, link = text.split(":")
        cell = Cell(int(devices), ShapedLink.parse(link))
        row = _row(runs, cell)
        rows[text] = row
        claims += _row_claims(f"{devices} devices, {link}", row)
    return claims, rows


def _row(runs: _Runs, cell: Cell) -> dict[str, list[list[float]]]:
    """Return the epoch seconds of every repetition of every choice, measured in turn."""
    row: dict[str, list[list[float]]] = {}
    choices = [choice for choice in _FIXED if _link_s(choice, cell.link) <= _LONGEST_EPOCH_S]
    for _ in range(_REPEATS):
        for choice in (*choices, _AUTO):
            epochs = _AUTO_EPOCHS if choice == _AUTO else _FIXED_EPOCHS
            outcome = runs.train(replace(cell, choice=choice, epochs=epochs))
            row.setdefault(str(choice), []).append(outcome.seconds)
        best = min(_fixed_s(row[str(choice)]) for choice in choices)
        choices = [choice for choice in choices if _fixed_s(row[str(choice)]) <= _HOPELESS * best]
    return row


def _row_claims(what: str, row: dict[str, list[list[float]]]) -> list[Claim]:
    best, name = min((_fixed_s(repetitions), name) for name, repetitions in row.items() if name != str(_AUTO))
    later = median(_mean(seconds[2:]) for seconds in row[str(_AUTO)])
    all_epochs = median(_mean(seconds) for seconds in row[str(_AUTO)])
    return [
        Claim(f"{what}: auto from the third epoch on / best fixed ({name})", later / best, "", most=1.05),
        Claim(f"{what}: all {_AUTO_EPOCHS} epochs of auto / best fixed", all_epochs / best, "", most=1.15),
    ]


def _fixed_s(repetitions: Iterable[Sequence[float]]) -> float:
    """Return the epoch of a fixed choice: the median of all epochs but the first of each repetition."""
    return median(seconds for repetition in repetitions for seconds in repetition[1:])


def _link_s(choice: Choice, link: ShapedLink) -> float:
    """Return about how long the link carries the activations of an epoch; 0 if it has none, or no limit."""
    if choice.method == "fl" or link.up is None:
        return 0.0
    # Activations after P=2 and P=3 have half the size of those after P=1; sfl chooses its P.
    size = _SAMPLE_BYTES / min(choice.split_point or 2, 2) * (0.5 if choice.encoding == "auto" else 1)
    return size * _SAMPLES * 8 / (link.up * 1e6)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# --- plans on steady links


def _steady(runs: _Runs) -> tuple[list[Claim], object]:
    claims, details = [], {}
    for link in ("50/50", "unlimited"):
        outcome = runs.train(Cell(2, ShapedLink.parse(link), epochs=_STEADY_EPOCHS))
        details[link] = outcome.as_json()
        claims.append(
            Claim(f"2 devices, {link}: changes of plans in {_STEADY_EPOCHS} rounds", outcome.changes, "", most=2)
        )
    return claims, details


# --- the pipeline's share of the link


def _wire(runs: _Runs) -> tuple[list[Claim], object]:
    """Compare P=1 N=8 over 10/25 with what one plain TCP connection carries there."""
    link = ShapedLink(10, 25)
    limit_bps = carried_bps(link)
    raw, coded = [], []
    for _ in range(max(1, _REPEATS // 2)):
        raw.append(runs.train(Cell(2, link, Choice("pipar", 1, 8, "raw"), epochs=3)))
        coded.append(runs.train(Cell(2, link, Choice("pipar", 1, 8), epochs=4)))
    sent = _SAMPLES * (_SAMPLE_BYTES + _LABEL_BYTES)
    raw_s = _fixed_s(outcome.seconds for outcome in raw)
    coded_s = _fixed_s(outcome.seconds[1:] for outcome in coded)
    coded_bytes = median(epoch["bytes_up"] / 2 for outcome in coded for epoch in outcome.result["epochs"][2:])
    claims = [
        Claim("raw, P=1 N=8, 10/25: limit of the link / epoch", sent * 8 / limit_bps / raw_s, "", least=0.95),
        Claim("P=1 N=8, 10/25: wire auto / raw", coded_s / raw_s, "", most=0.62),
        Claim("wire auto: limit of its own bytes / epoch", coded_bytes * 8 / limit_bps / coded_s, "", least=0.95),
        Claim("raw: bytes beyond payload, up", _overhead(raw[0], sent), "", most=0.015),
    ]
    cells = {"raw": [one.as_json() for one in raw], "auto": [one.as_json() for one in coded]}
    return claims, {"plain_tcp_bps": limit_bps, **cells}


def _overhead(outcome: Outcome, epoch_bytes: int) -> float:
    """Return what TCP carried up beyond the payload of all epochs, as a share of it."""
    carried = median(up for up, _ in outcome.tcp_bytes.values())
    return carried / (epoch_bytes * len(outcome.seconds)) - 1
