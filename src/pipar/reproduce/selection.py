"""The chosen plans against exhaustive search: the paper's two tables of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pipar.reproduce.experiment import Cell, Compared, Experiment, Outcome, Row
from pipar.reproduce.published import published
from pipar.reproduce.tables import against
from pipar.reproduce.testbed import BATCH_SIZE, LARGE, SAMPLES, SMALL, Trial, trainings

SEED = 20240612
#: N of a quick search.
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 50)
#: Epochs of a training that a choice is for, at least: "hundreds or more".
_EPOCHS = 100
#: As good as the best: what two simulations with other jitter differ by.
_OPTIMAL = 0.995


def _cells(models: tuple[str, ...], quick: bool) -> list[Cell]:
    options = {"seed": SEED, **({"micro_batches": list(GRID)} if quick else {})}
    return [
        Cell("search", Trial(*of).tree(), options, dict(zip(("network", "data", "link"), of, strict=True)))
        for of in trainings(models, quick=quick)
    ]


def _rows(outcomes: Sequence[Outcome]) -> list[Row]:
    rows = []
    for outcome in outcomes:
        row = outcome.row
        printed = published().selection(row["network"], row["data"], row["link"])
        assert printed is not None
        printed_plan = f"P={printed.split_point} N={printed.micro_batches}"
        rows.append({**row, "in_the_paper": printed_plan, "paper_s": printed.epoch_s, "its_score": printed.score})
    return rows


def compare(rows: Sequence[Row]) -> list[Compared]:
    """Hold scores, and what choosing takes, against what the text says."""
    if not rows:
        return []
    same_cut = [row["chosen"].split()[0] == row["best"].split()[0] for row in rows]
    optimal = [row["score"] >= _OPTIMAL for row in rows]
    costs = [100 * row["planning_s"] / row["chosen_s"] for row in rows]
    faster = [_training_every_pair_s(row) / row["planning_s"] for row in rows if row["planning_s"]]
    of = published().statement
    return [
        against(of("score"), [row["score"] for row in rows]),
        against(
            of("optimal-plans"),
            [_percent(optimal)],
            what=f"cases with a score of {_OPTIMAL} or more",
            better="more",
        ),
        against(of("optimal-split-points"), [_percent(same_cut)], why="other cuts may be as good"),
        against(of("planning-cost"), [_mean(costs)], better="less"),
        against(
            of("planning-speed-up"),
            [_mean(faster)],
            what="time of an iteration by every plan that was searched, at least, over time to choose, on average",
            why="an iteration of each is counted with the best one's seconds",
            better="more",
        ),
        against(of("planning-overhead"), [_mean(costs) / _EPOCHS], what=f"time to choose, of {_EPOCHS} epochs"),
    ]


def _training_every_pair_s(row: Row) -> float:
    """Return what the paper's search takes at least: each plan is trained for one iteration, the best as all others."""
    iterations = -(-SAMPLES[row["data"]] // BATCH_SIZE)
    return float((row["searched"] + row["ruled_out"]) * row["best_s"] / iterations)


def _percent(held: Sequence[bool]) -> float:
    return 100 * sum(held) / len(held)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_COLUMNS = (
    "network", "data", "link", "chosen", "chosen_s", "planning_s", "best", "best_s", "search_s", "score",
    "paper", "paper_score", "in_the_paper", "paper_s", "its_score", "run",
)  # fmt: skip
_NOTES = (
    "Plans that were chosen, and the best of all in a world that the planner does not know: every layer takes up to "
    "15 % more or less than its profile says, every stage 5 %. planning_s and search_s are CPU seconds. `paper` is "
    "what the paper's estimate chooses here, with its score; `in the paper` is what the paper prints."
)


def _selection(name: str, title: str, models: tuple[str, ...]) -> Experiment:
    return Experiment(name, title, partial(_cells, models), _COLUMNS, compare, rows=_rows, notes=_NOTES)


SELECTION_SMALL = _selection("selection-small", "Chosen plans and the best ones, small networks (Table VII)", SMALL)
SELECTION_LARGE = _selection("selection-large", "Chosen plans and the best ones, large networks (Table VIII)", LARGE)
