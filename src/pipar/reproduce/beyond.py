"""What the paper did not run: exact encodings on its testbed, and its networks on today's boards and links."""

from __future__ import annotations

from functools import partial
from itertools import product

from pipar.reproduce.efficiency import TIME_NOTES, WHERE, by_all_methods, compare_methods, plot_times, time_rows
from pipar.reproduce.experiment import Cell, Experiment
from pipar.reproduce.testbed import LARGE, SMALL, Trial, trainings

EXACT_WIRE = Experiment(
    "exact-wire",
    "The same epochs with fewer bytes and the same bits",
    lambda quick: [
        cell
        for encoding in ("raw", "auto")
        for models in ((SMALL,) if quick else (SMALL, LARGE))
        for trial in (Trial(*of, encoding=encoding) for of in trainings(models, quick=quick))
        for cell in by_all_methods([trial], wire=encoding)
    ],
    (*WHERE, "wire", "fl_s", "sfl_s", "pipar_s", "fl/pipar", "sfl/pipar", "pipar_plan", "run"),
    compare_methods,
    plot_times,
    rows=partial(time_rows, keys=(*WHERE, "wire")),
    notes="`wire` is wire.encoding: raw as in the paper, auto with what the planner finds best of the exact "
    "encodings, also for models. " + TIME_NOTES,
)

#: Links of today: usual rates in towns, not the best ones.
TODAYS_LINKS: dict[str, dict[str, str]] = {
    "5g": {"up": "50Mbit/s", "down": "200Mbit/s", "latency": "15ms"},
    "wifi-6": {"up": "400Mbit/s", "down": "400Mbit/s", "latency": "3ms"},
}
TODAYS_BOARDS = ("raspberry-pi-5", "jetson-orin-nano")


def _todays_cells(quick: bool) -> list[Cell]:
    models = SMALL if quick else (*SMALL, *LARGE)
    of = [(model, data) for model, data, link in trainings(models, quick=True) if link == "4g"]
    return [
        cell
        for board, (model, data), (name, link) in product(TODAYS_BOARDS, of, TODAYS_LINKS.items())
        for cell in by_all_methods([Trial(model, data, link, board=board, board_speed=1.0)], link=name, board=board)
    ]


_BOARDED = (*WHERE, "board")
TODAY = Experiment(
    "today",
    "The same networks on today's boards and links",
    _todays_cells,
    (*_BOARDED, "fl_s", "sfl_s", "pipar_s", "fl/pipar", "sfl/pipar", "sfl_plan", "pipar_plan", "run"),
    compare_methods,
    plot_times,
    rows=partial(time_rows, keys=_BOARDED),
    notes="100 boards, as fast as their names say; 5g has 50 Mbit/s up and 200 down at 15 ms, wifi-6 400 both ways at "
    "3 ms; the server is the paper's. " + TIME_NOTES,
)
