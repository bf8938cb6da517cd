"""How the benchmark of privacy's costs evaluates and draws the seconds of runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import privacy
from benchmarks.privacy import (
    Cell,
    claims,
    papers_cell,
    planned_cell,
    real_claims,
    row,
    summary,
    table,
)
from benchmarks.privacy_picture import decades, picture, round_step
from benchmarks.quoted import (
    PRIVACY,
    PRIVACY_PICTURE,
    PRIVACY_TABLES,
    privacy_picture,
    quoted_privacy,
    quoted_privacy_tables,
)
from benchmarks.record import RESULTS


def cell(method: str, classic: float, pixel: float, link: str = "4g") -> Cell:
    return Cell("vgg5", link, method, "P=1 N=4", {"without": 10.0, "classic": 10.0 + classic, "pixel": 10.0 + pixel})


CELLS = [
    cell("fl", 2.0, 0.25), cell("sfl", 0.5, 0.25), cell("pipar", 0.25, 0.125),
    cell("fl", 1.0, 0.25, "wifi"), cell("sfl", 0.5, 0.125, "wifi"), cell("pipar", 0.75, 0.25, "wifi"),
]  # fmt: skip


def test_an_overhead_is_the_additional_time_of_an_epoch_and_the_worst_cell_counts() -> None:
    values = {claim.what.partition(" (paper")[0]: claim for claim in claims(CELLS)}
    more = values["classic DP: overhead of pipar - that of fl, the largest of 9 cells"]
    assert (more.value, more.holds) == (-0.25, True)  # on wifi: 0.75 - 1
    assert values["PixelDP: overhead of pipar - that of fl, the largest of 9 cells"].value == 0.0  # on 4g: -0.125
    largest = [values[f"{words}: largest overhead on {method}"].value for words in ("classic DP", "PixelDP")
               for method in ("fl", "sfl", "pipar")]  # fmt: skip
    assert largest == [2.0, 0.5, 0.75, 0.25, 0.25, 0.25]
    assert not claims([*CELLS[:5], cell("pipar", 1.5, 0.25, "wifi")])[0].holds
    assert not claims([*CELLS[:5], cell("pipar", 0.75, 0.75, "wifi")])[1].holds
    here = claims(CELLS, "planned and encoded here")
    assert [claim.value for claim in here] == [claim.value for claim in claims(CELLS)]
    assert {claim.what for claim in here}.isdisjoint(claim.what for claim in claims(CELLS))


def test_the_fastest_real_epochs_of_the_same_turn_are_compared() -> None:
    turns = [
        {"without": [9.0, 4.0], "classic": [5.0, 9.0], "pixel": [4.0, 4.0]},
        {"without": [8.0, 8.0], "classic": [8.0, 9.0], "pixel": [12.0, 10.0]},
        {"without": [2.0, 3.0], "classic": [4.0, 4.0], "pixel": [2.0, 5.0]},
    ]
    found = real_claims({"fl": turns})
    assert [claim.value for claim in found] == [1.25, 1.0]
    assert [claim.holds for claim in found] == [False, True]


class Runs:
    """Replaces runs: each takes a second longer than the previous one; records the requests."""

    def __init__(self) -> None:
        self.settings: list[Sequence[str]] = []

    def __call__(self, settings: Sequence[str]) -> dict[str, Any]:
        self.settings.append(settings)
        seconds = (99.0, 10.0 + len(self.settings))
        plans = [{"split_point": 3, "micro_batches": 7}]
        return {"plans": plans, "epochs": [{"seconds": each} for each in seconds]}

    def asked(self, *keys: str) -> list[list[str]]:
        return [[one for one in settings if one.startswith(keys)] for settings in self.settings]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    runs = Runs()
    monkeypatch.setattr(privacy, "_run", runs)
    return runs


def test_the_modes_of_a_cell_differ_in_nothing_but_privacy_and_have_the_papers_plan(runs: Runs) -> None:
    found = papers_cell("vgg5", "wifi", "pipar")
    assert found == Cell("vgg5", "wifi", "pipar", "P=3 N=7", {"without": 11.0, "classic": 12.0, "pixel": 13.0})
    assert runs.asked("plan.split", "plan.micro") == [["plan.split_point=1", "plan.micro_batches=3"]] * 3
    assert runs.asked("privacy.") == [[], ["privacy.noise_multiplier=1.0"], ["privacy.pixel_epsilon=1.0"]]
    papers_cell("vgg5", "wifi", "sfl")
    assert runs.asked("plan.split", "plan.micro")[3:] == [["plan.split_point=1", "plan.micro_batches=1"]] * 3
    papers_cell("vgg5", "wifi", "fl")
    assert runs.asked("plan.split", "plan.micro")[6:] == [[]] * 3


def test_plans_are_chosen_without_privacy_and_kept_with_it(runs: Runs) -> None:
    assert planned_cell("vgg5", "4g", "pipar").seconds == {"without": 11.0, "classic": 12.0, "pixel": 13.0}
    given = ["plan.split_point=3", "plan.micro_batches=7"]
    assert runs.asked("plan.split", "plan.micro") == [[], given, given]
    assert runs.asked("wire.") == [[], [], []]


def test_tables_have_a_row_for_each_cell_and_the_papers_numbers_next_to_the_largest() -> None:
    assert row(CELLS[0]) == "| VGG-5 | 4g | fl | P=1 N=4 | 10.0 | 2.00 | 0.25 |"
    assert row(cell("pipar", 0.00021, 0.066)).endswith("| 0.0002 | 0.07 |")
    assert len(table(CELLS).splitlines()) == 2 + len(CELLS)
    trees = [vars(one) for one in CELLS]
    lines = summary({"cells": trees, "cells, planned and encoded here": trees[:3]}).splitlines()
    assert lines[2:5] == [
        "| classic DP, in the paper | 11.7 | 0.16 | 0.15 |",
        "| classic DP, by its plans, raw | 2.00 | 0.50 | 0.75 |",
        "| classic DP, planned and encoded here | 2.00 | 0.50 | 0.25 |",
    ]


def heights(svg: str, words: str) -> list[float]:
    return [float(height) for height in re.findall(rf'height="([\d.]+)"[^>]*><title>[^<]*{words}', svg)]


def test_a_bar_is_as_high_as_its_seconds_and_overheads_are_also_drawn_on_a_logarithmic_axis() -> None:
    svg = picture(CELLS, {"vgg5": "VGG-5"})
    without, classic = heights(svg, "without privacy"), heights(svg, "classic DP on top")
    assert len(without) == len(CELLS)
    assert len(set(without)) == 1
    stacked, alone = classic[::2], classic[1::2]
    assert stacked[0] == pytest.approx(without[0] * 2.0 / 10.0, abs=0.01)
    assert alone[0] - alone[3] == pytest.approx(alone[3] - alone[1], abs=0.02)  # 2 s, 1 s, half a second
    nothing = replace(CELLS[0], seconds={"without": 10.0, "classic": 9.0, "pixel": 10.0})
    assert heights(picture([nothing], {"vgg5": "VGG-5"}), "on top") == [0.0] * 4


def test_axes_have_round_numbers() -> None:
    assert [round_step(most) for most in (4.9, 10.0, 11.0, 260.0)] == [1, 2, 5, 100]
    assert decades(CELLS) == (-1, 1)


def test_the_pages_have_the_tables_and_the_picture_of_the_checked_in_results() -> None:
    text, tables = PRIVACY.read_text("utf-8"), PRIVACY_TABLES.read_text("utf-8")
    assert text == quoted_privacy(text)
    assert tables == quoted_privacy_tables(tables)
    drawn = privacy_picture()
    assert drawn == PRIVACY_PICTURE.read_text("utf-8") == (RESULTS / "privacy.svg").read_text("utf-8")
