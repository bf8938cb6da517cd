"""Real deployments in network namespaces: everything "auto" against the best fixed choice, and the pipeline's links.

    python -m benchmarks deployment                       everything, in about an hour
    python -m benchmarks.deployment_cell --link 10/25     one training (its docstring shows more)

Server and devices are real processes with mTLS, on this machine's cores, over links that the kernel shapes; "local" are
processes of `pipar run`. Fixed choices train three epochs, of which the last two count; "auto" trains seven. Trainings
alternate; after the first repetition, fixed choices that took 15 % longer than the best are left out. The environment
limits what is measured: PIPAR_DEPLOYMENT_CELLS (as in "2:10/25 4:unlimited", or "none"), PIPAR_DEPLOYMENT_REPEATS (3)
and PIPAR_DEPLOYMENT_PARTS (as in "table local steady wire"). What was measured before on this machine is kept, and
repetitions are added to it, so that a machine that is seldom quiet can be measured piece by piece; with
PIPAR_DEPLOYMENT_FRESH=1 nothing is kept.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.deployment_cell import Cell, Choice, Outcome, end_like_ctrl_c, make_certificates, names, train
from benchmarks.plain_stream import carried_bps
from benchmarks.record import RESULTS, Claim, pipar
from benchmarks.shaped_namespaces import ShapedLink
from pipar.execution.schedule import cut_batch
from pipar.profiling.cache import machine_fingerprint

_CELLS = os.environ.get("PIPAR_DEPLOYMENT_CELLS", "2:10/25 2:50/50 2:1/5 2:unlimited 4:10/25 4:50/50 4:1/5 4:unlimited")
_REPEATS = int(os.environ.get("PIPAR_DEPLOYMENT_REPEATS", "3"))
_PARTS = os.environ.get("PIPAR_DEPLOYMENT_PARTS", "table local steady wire").split()
_DATA = "cifar10" if os.environ.get("PIPAR_DATA") else "synthetic"
_AUTO = Choice()
_FIXED = (
    Choice("fl"),
    Choice("sfl"),
    *(Choice("pipar", p, n, encoding) for p, n in ((1, 8), (2, 4), (3, 4)) for encoding in ("auto", "raw")),
)
#: Settings of `pipar run`, and the choices that "auto" is compared with there.
_LOCAL = {
    "pipar run, 2 devices at full speed, unlimited": (
        "--devices 2 --link unlimited --set devices.speed=1.0 --set data.samples_per_device=500"
    ),
    "pipar run, 4 devices at speed 0.05, 4G": (
        "--devices 4 --link 4g --set devices.speed=0.05 --set data.samples_per_device=200"
    ),
}
_FIXED_LOCAL = (Choice("fl"), Choice("sfl"), Choice("pipar", 1, 8), Choice("pipar", 1, 25), Choice("pipar", 3, 4))
#: Names of fewer devices are the first of these.
_MOST_DEVICES = 9
_AUTO_EPOCHS, _FIXED_EPOCHS, _STEADY_EPOCHS = 7, 3, 30
#: A fixed choice that took this much longer than the best once is not measured again.
_HOPELESS = 1.15
#: Tensor bytes of a sample that cross the cut P=1 in each direction, and of its label: VGG-5 on 32 x 32 pixels.
_SAMPLE_BYTES, _LABEL_BYTES = 32 * 16 * 16 * 4, 8
_SAMPLES, _BATCH = 500, 100
#: Fixed choices whose activations need more than this of the link are not measured: fl is far faster there.
_LONGEST_EPOCH_S = 20.0


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    end_like_ctrl_c()
    runs = _Runs(folder)
    claims: list[Claim] = []
    details = _kept()
    for part, measured in (("table", _table), ("local", _local), ("steady", _steady), ("wire", _wire)):
        before = details.get(part, {})
        if part in _PARTS:
            details[part] = measured(runs, before)
        claims += _CLAIMS[part](details[part]) if part in details else []
    return claims, details


def _kept() -> dict[str, Any]:
    """Return what was measured before, on this machine."""
    path = RESULTS / "deployment.json"
    if os.environ.get("PIPAR_DEPLOYMENT_FRESH") or not path.exists():
        return {}
    content = json.loads(path.read_text("utf-8"))
    return dict(content["details"]) if content["machine"] == machine_fingerprint() else {}


class _Runs:
    """Trains cells one after another, each in a folder of its own, with the same certificates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._certs = make_certificates(folder, names(Cell(_MOST_DEVICES, ShapedLink())))
        self._count = 0

    def train(self, cell: Cell) -> Outcome:
        outcome = train(replace(cell, data=_DATA), self._next(), self._certs)
        _show(f"{cell.devices} devices, {cell.link}, {cell.choice}", outcome.seconds)
        return outcome

    def run(self, options: str, choice: Choice, epochs: int) -> list[float]:
        """Train with `pipar run`; return the seconds of its epochs."""
        settings = [f"run.method={choice.method}", f"wire.encoding={choice.encoding}", f"run.epochs={epochs}"]
        settings += ["model.norm=batch", f"data.name={_DATA}", "data.validation=100", "data.test=100"]
        if choice.split_point is not None:
            settings += [f"plan.split_point={choice.split_point}", f"plan.micro_batches={choice.micro_batches}"]
        if _DATA == "synthetic":
            settings.append("data.shape=[3, 32, 32]")
        words = [word for setting in settings for word in ("--set", setting)]
        result = pipar(["run", *options.split(), *words], self._next())
        seconds = [float(epoch["seconds"]) for epoch in result["epochs"]]
        _show(f"{options}, {choice}", seconds)
        return seconds

    def _next(self) -> Path:
        self._count += 1
        return self._folder / str(self._count)


def _show(what: str, seconds: Sequence[float]) -> None:
    print(f"  {what}: {' '.join(f'{epoch:.2f}' for epoch in seconds)} s", flush=True)


# --- "auto" against the best fixed choice


#: Seconds of the epochs of every repetition, by choice.
Row = dict[str, list[list[float]]]


def _table(runs: _Runs, before: Mapping[str, Row]) -> dict[str, Row]:
    rows = dict(before)
    for text in [] if _CELLS == "none" else _CELLS.split():
        devices, link = text.split(":")
        cell = Cell(int(devices), ShapedLink.parse(link))
        choices = [choice for choice in _FIXED if _is_possible(choice, cell.link)]

        def train(choice: Choice, epochs: int, cell: Cell = cell) -> list[float]:
            return runs.train(replace(cell, choice=choice, epochs=epochs)).seconds

        rows[text] = _row(choices, train, rows.get(text, {}))
    return rows


def _local(runs: _Runs, before: Mapping[str, Row]) -> dict[str, Row]:
    """Compare processes of `pipar run`: as fast as this machine, and emulated boards on 4G."""
    rows = dict(before)
    for name, settings in _LOCAL.items():
        rows[name] = _row(_FIXED_LOCAL, lambda *what, given=settings: runs.run(given, *what), rows.get(name, {}))
    return rows


def _row(choices: Sequence[Choice], train: Callable[[Choice, int], list[float]], before: Row) -> Row:
    """Return a row with more repetitions of every choice, measured in turn."""
    row = {name: list(repetitions) for name, repetitions in before.items()}
    for _ in range(_REPEATS):
        known = [choice for choice in choices if str(choice) in row]
        best = min((_fixed_s(row[str(choice)]) for choice in known), default=math.inf)
        for choice in (*choices, _AUTO):
            if choice != _AUTO and choice in known and _fixed_s(row[str(choice)]) > _HOPELESS * best:
                continue
            row.setdefault(str(choice), []).append(train(choice, _AUTO_EPOCHS if choice == _AUTO else _FIXED_EPOCHS))
    return row


def _row_claims(rows: Mapping[str, Row]) -> list[Claim]:
    claims = []
    for text, row in rows.items():
        what = text if text in _LOCAL else "{} devices, {}".format(*text.split(":"))
        best = min(_fixed_s(repetitions) for name, repetitions in row.items() if name != str(_AUTO))
        later = median(_mean(seconds[2:]) for seconds in row[str(_AUTO)])
        all_epochs = median(_mean(seconds) for seconds in row[str(_AUTO)])
        claims += [
            Claim(f"{what}: auto from the third epoch on / best fixed", later / best, "", most=1.05),
            Claim(f"{what}: all {_AUTO_EPOCHS} epochs of auto / best fixed", all_epochs / best, "", most=1.15),
        ]
    return claims


def _fixed_s(repetitions: Iterable[Sequence[float]]) -> float:
    """Return the epoch of a fixed choice: the median of all epochs but the first of each repetition."""
    return median(seconds for repetition in repetitions for seconds in repetition[1:])


def _is_possible(choice: Choice, link: ShapedLink) -> bool:
    """Return whether a choice is worth measuring: raw values never are on a slow link, nor epochs of minutes."""
    return _link_s(choice, link) <= _LONGEST_EPOCH_S and (choice.encoding == "auto" or link.up is None)


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


def _steady(runs: _Runs, _: object) -> dict[str, Any]:
    return {
        link: runs.train(Cell(2, ShapedLink.parse(link), epochs=_STEADY_EPOCHS)).as_json()
        for link in ("50/50", "unlimited")
    }


def _steady_claims(details: Mapping[str, Any]) -> list[Claim]:
    return [
        Claim(
            f"2 devices, {link}: changes of plans in {_STEADY_EPOCHS} rounds",
            sum(change["epoch"] > 1 for change in outcome["changes"]),
            "",
            most=2,
        )
        for link, outcome in details.items()
    ]


# --- the pipeline's share of the link


def _wire(runs: _Runs, _: object) -> dict[str, Any]:
    """Compare P=1 N=8 over 10/25 with what one plain TCP connection carries there."""
    link = ShapedLink(10, 25)
    limit_bps = carried_bps(link)
    raw, coded = [], []
    for _repetition in range(max(1, _REPEATS // 2)):
        raw.append(runs.train(Cell(2, link, Choice("pipar", 1, 8, "raw"), epochs=3)))
        coded.append(runs.train(Cell(2, link, Choice("pipar", 1, 8), epochs=4)))
    return {
        "plain_tcp_bps": limit_bps,
        "raw": [one.as_json() for one in raw],
        "auto": [one.as_json() for one in coded],
    }


def _wire_claims(details: Mapping[str, Any]) -> list[Claim]:
    raw, coded, limit_bps = details["raw"], details["auto"], details["plain_tcp_bps"]
    sent = _SAMPLES * (_SAMPLE_BYTES + _LABEL_BYTES)
    raw_s = _fixed_s(outcome["seconds"] for outcome in raw)
    coded_s = _fixed_s(outcome["seconds"][1:] for outcome in coded)
    coded_bytes = median(size / 2 for outcome in coded for size in outcome["bytes_up"][2:])
    shortest_s = _shortest_s(sent, limit_bps)
    shortest_coded_s = _shortest_s(coded_bytes, limit_bps)
    return [
        Claim("raw, P=1 N=8, 10/25: limit of the link / epoch", sent * 8 / limit_bps / raw_s, "", least=0.95),
        Claim("P=1 N=8, 10/25: wire auto / raw", coded_s / raw_s, "", most=0.62),
        Claim("wire auto: limit of its own bytes / epoch", coded_bytes * 8 / limit_bps / coded_s, "", least=0.95),
        Claim("raw: shortest epoch of equal micro-batches / epoch", shortest_s / raw_s, "", least=0.97),
        Claim("wire auto: the same with its own bytes", shortest_coded_s / coded_s, "", least=0.97),
        Claim("raw: bytes beyond payload, up", _overhead(raw[0], sent), "", most=0.015),
    ]


def _shortest_s(sent_bytes: float, limit_bps: float) -> float:
    """Return the shortest epoch of P=1 N=8 over 10/25 that computes what it has to, in no time.

    The next batch is trained with weights that the last gradient of this one changes. So in every iteration, the
    uplink is idle while the last micro-batch's gradient, which is as large as its activations, travels down.
    """
    last_share = cut_batch(_BATCH, 8, batch_statistics=True)[-1] / _BATCH
    up_s, down_s = (sent_bytes * 8 / rate for rate in (limit_bps, limit_bps * 25 / 10))
    return up_s + last_share * down_s


def _overhead(outcome: Mapping[str, Any], epoch_bytes: int) -> float:
    """Return what TCP carried up beyond the payload of all epochs, as a share of it."""
    carried = median(up for up, _ in outcome["tcp_bytes"].values())
    return carried / (epoch_bytes * len(outcome["seconds"])) - 1


_CLAIMS: dict[str, Callable[[Any], list[Claim]]] = {
    "table": _row_claims,
    "local": _row_claims,
    "steady": _steady_claims,
    "wire": _wire_claims,
}
