"""A map has every requested pair, the chosen one, and its neighbours."""

from __future__ import annotations

import pytest

from reproduction.cells import run_cell
from reproduction.experiment import Outcome
from reproduction.plan_map import PLAN_MAP
from reproduction.tables import page
from reproduction.testbed import Trial


@pytest.mark.slow
def test_every_cut_with_every_given_n_is_a_row_and_one_of_them_is_chosen() -> None:
    (cell, *_) = PLAN_MAP.cells(True)
    tree = Trial("vgg5", "cifar10", "4g", devices=2).tree()
    rows = PLAN_MAP.rows([Outcome(cell, run_cell("map", tree, {"micro_batches": [1, 4]}))])
    (chosen,) = [row for row in rows if row["chosen"]]
    around = range(chosen["micro_batches"] - 2, chosen["micro_batches"] + 3)
    counts = {1, 4, *(n for n in around if n >= 1)}
    cuts_behind_which_pieces_overlap = {(p, n) for p in range(1, 5) for n in counts}
    assert {(row["split_point"], row["micro_batches"]) for row in rows} == cuts_behind_which_pieces_overlap | {(5, 1)}
    assert max(row["score"] for row in rows) == 1.0
    assert chosen["score"] > 0.95
    assert set(PLAN_MAP.columns) <= set(rows[0])


def test_if_no_plan_fits_there_is_a_row_without_numbers() -> None:
    (cell, *_) = PLAN_MAP.cells(True)
    (row,) = PLAN_MAP.rows([Outcome(cell, {"fits": False, "why": "too little memory"})])
    assert (row["network"], row["run"], row.get("seconds")) == ("vgg5", cell.hash, None)
    assert page(PLAN_MAP, [row]).splitlines()[-1] == f"| vgg5 | cifar10 | 4g | {cell.hash} |"
