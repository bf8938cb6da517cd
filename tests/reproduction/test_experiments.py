"""The experiments' cells are valid trainings, and their tables agree with the results."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.made_up_cells import TINY, outcomes, timing

from pipar.errors import InputError, PlanError
from pipar.job.prepare import unplanned_timing_only_job
from pipar.methods import Plan
from pipar.planner.search import search_kinds
from pipar.planner.simulator import simulate
from pipar.settings.config_file import config_from
from reproduction.bandwidth import BANDWIDTH
from reproduction.beyond_the_paper import EXACT_WIRE, TODAY
from reproduction.catalog import EXPERIMENTS, experiments
from reproduction.cells import RUNNERS, run_cell
from reproduction.efficiency import IDLE_SMALL, TIME_LARGE, TIME_SMALL
from reproduction.experiment import Compared, Experiment, Outcome
from reproduction.privacy import PRIVACY
from reproduction.reasons import why_more
from reproduction.scale import SCALE
from reproduction.selection import SELECTION_SMALL
from reproduction.testbed import (
    BOARD_SPEED,
    SERVER_SPEED,
    Printed,
    Trial,
    error,
    fitted_speeds,
    printed_epochs,
)
from reproduction.testbed_check import TESTBED
from reproduction.variations import BATCH_SIZE, HETEROGENEOUS


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_cell_is_a_valid_configuration_with_unique_labels(name: str) -> None:
    experiment = EXPERIMENTS[name]
    quick, full = experiment.cells(True), experiment.cells(False)
    assert 0 < len(quick) < len(full)
    assert len({tuple(cell.labels.items()) for cell in full}) == len(full)
    for cell in full:
        assert cell.how in RUNNERS
        small = {**cell.config, "devices": [{**group, "count": 1} for group in cell.config["devices"]]}
        config_from(small)  # a hundred thousand devices take a while


@pytest.mark.slow
def test_idle_times_are_those_of_the_epochs_that_were_timed() -> None:
    assert {cell.hash for cell in IDLE_SMALL.cells(False)} == {cell.hash for cell in TIME_SMALL.cells(False)}


def test_small_networks_are_trained_with_every_method_on_every_link() -> None:
    assert len(TIME_SMALL.cells(False)) == 3 * 2 * 3 * 3 * 3


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("experiment", [TESTBED, TIME_SMALL, TIME_LARGE, IDLE_SMALL], ids=lambda one: one.name)
def test_one_ten_and_a_hundred_devices_are_shown(experiment: Experiment, quick: bool) -> None:
    assert {cell.labels["devices"] for cell in experiment.cells(quick)} == {100, 10, 1}


def _lines(compared: list[Compared], *words: str) -> list[Compared]:
    return [line for line in compared if all(word in line.what for word in words)]


def test_times_are_side_by_side_with_their_ratios_and_the_papers() -> None:
    trial = Trial("vgg5", "mnist", "4g")
    (row,) = TIME_SMALL.rows(outcomes(trial, {"fl": timing(20.0), "sfl": timing(15.0), "pipar": timing(10.0)}))
    assert (row["fl_s"], row["sfl_s"], row["pipar_s"], row["paper_s"]) == (20.0, 15.0, 10.0, 10.5)
    assert (row["fl/pipar"], row["sfl/pipar"]) == (2.0, 1.5)
    assert len(row["run"].split()) == 3
    compared = TIME_SMALL.compare([row])
    (seconds,) = _lines(compared, ": epoch with pipar")
    assert (seconds.verdict, seconds.ratio) == ("inside", pytest.approx(10 / 10.5))
    assert [line.what for line in compared if line.is_fitted] == [
        "vgg5, 100 devices: epoch of fl over epoch of pipar",
        seconds.what,
    ]
    assert [line.verdict for line in _lines(compared, "pipar is the fastest")] == ["inside"]


def test_a_method_that_does_not_fit_has_no_time_and_is_compared_with_nothing() -> None:
    trial = Trial("vgg16", "cifar100", "wifi")
    (row,) = TIME_LARGE.rows(outcomes(trial, {"fl": timing(None), "sfl": timing(40.0), "pipar": timing(35.0)}))
    assert row["fl_s"] is None
    assert row["fl/pipar"] is None
    assert [line.ours for line in _lines(TIME_LARGE.compare([row]), "a board has the memory")] == [0.0]
    assert [line.ours for line in _lines(TIME_LARGE.compare([row]), "pipar is the fastest")] == [40 / 35]


def test_a_large_network_that_fits_here_but_not_in_the_paper_is_named() -> None:
    trial = Trial("mobilenetv3_large", "cifar100", "wifi")
    rows = TIME_LARGE.rows(outcomes(trial, {"fl": timing(60.0), "sfl": timing(40.0), "pipar": timing(35.0)}))
    (line,) = _lines(TIME_LARGE.compare(rows), "a board has the memory")
    assert (line.ours, line.verdict) == (1.0, "above")
    assert line.why.startswith("mobilenetv3_large cifar100 (wifi): ")


@pytest.mark.parametrize(
    ("seconds", "quickest", "ties", "slower"),
    [(9.0, "inside", 0.0, 0.0), (10.0, "inside", 1.0, 0.0), (10.01, "inside", 1.0, 0.0), (10.1, "below", 0.0, 1.0)],
)
def test_a_faster_method_and_a_tie_are_distinguished(seconds: float, quickest: str, ties: float, slower: float) -> None:
    results = {"fl": timing(20.0), "sfl": timing(10.0), "pipar": timing(seconds)}
    compared = TIME_SMALL.compare(TIME_SMALL.rows(outcomes(Trial("vgg5", "mnist", "4g"), results)))
    assert [line.verdict for line in _lines(compared, "pipar is the fastest")] == [quickest]
    assert [line.ours for line in _lines(compared, "takes as long", "has cut")] == [ties]
    assert [line.ours for line in _lines(compared, "takes longer")] == [slower]


def test_a_larger_gain_of_pipar_is_explained_by_its_plans_and_the_printed_ones() -> None:
    rows = [
        {"network": "vgg5", "data": "cifar10", "link": "4g", "pipar_plan": "P=1 N=41"},  # the paper has N = 12
        {"network": "vgg5", "data": "cifar10", "link": "wifi", "pipar_plan": "P=1 N=2"},  # and 3
        {"network": "vgg5", "data": "cifar10", "link": "5g", "pipar_plan": "P=1 N=2"},
        {"network": "vgg5", "data": "cifar10", "link": "4g", "pipar_plan": "50 x P=1 N=2, 50 x P=2 N=3"},
    ]
    assert why_more(rows).endswith("N is larger than the paper's in 1 and smaller in 1 of 2 cases")
    assert "N is" not in why_more(rows[2:])


def test_a_tie_names_its_cells_and_the_server_as_the_bottleneck() -> None:
    results = {"fl": timing(20.0), "sfl": timing(10.0, plan="P=1 N=1"), "pipar": timing(10.0, plan="P=1 N=1")}
    found = outcomes(Trial("resnet18", "mnist", "4g"), results) + outcomes(Trial("resnet18", "mnist", "wifi"), results)
    rows = TIME_SMALL.rows(found)
    (line,) = _lines(TIME_SMALL.compare(rows), "takes as long", "has cut")
    assert (line.ours, line.verdict) == (2.0, "above")
    assert line.why == (
        "resnet18 mnist (4g, wifi): the server is the bottleneck (its cores are busy for 50 % of the epoch, "
        "including the exchange of models): micro-batches would only add calls there, and the planner chooses N = 1, "
        "which is sfl"
    )
    assert set(line.run.split()) == {outcome.cell.hash for outcome in found}


def test_a_tie_with_federated_learning_states_by_how_much_sfl_is_faster() -> None:
    def lines(sfl_s: float) -> list[Compared]:
        results = {"fl": timing(10.0), "sfl": timing(sfl_s), "pipar": timing(10.0, plan="P=5 N=1", is_whole=True)}
        rows = TODAY.rows(outcomes(Trial("vgg5", "cifar10", "wifi"), results, board="raspberry-pi-5"))
        return _lines(TODAY.compare(rows), "takes as long", "has chosen P = Q")

    (slower,), (quicker,) = lines(11.0), lines(9.986)
    assert (slower.ours, quicker.ours) == (1.0, 1.0)
    assert slower.why.startswith(
        "vgg5 cifar10 raspberry-pi-5 (wifi): with these boards and links splitting does not pay"
    )
    assert "%" not in slower.why
    assert "sfl takes up to 0.14 % less, and up to 0.2 % is a tie" in quicker.why


def test_cells_in_which_pipar_is_slower_are_named() -> None:
    results = {"fl": timing(20.0), "sfl": timing(9.0), "pipar": timing(10.0)}
    rows = EXACT_WIRE.rows(outcomes(Trial("vgg5", "cifar10", "wifi"), results, wire="auto"))
    (line,) = _lines(EXACT_WIRE.compare(rows), "takes longer")
    assert (line.verdict, line.why) == ("above", "vgg5 cifar10 auto (wifi): the planner missed the best plan there")


def test_every_line_names_its_method() -> None:
    results = {"fl": timing(20.0), "sfl": timing(15.0), "pipar": timing(10.0)}
    found = outcomes(Trial("vgg5", "mnist", "4g"), results)
    printed = [cell for cell in TESTBED.cells(True) if cell.labels["network"] == "vgg5"][:3]
    with_memory = {**timing(21.0), "server_bytes": 4e9}
    lines = [
        *TIME_SMALL.compare(TIME_SMALL.rows(found)),
        *IDLE_SMALL.compare(IDLE_SMALL.rows(found)),
        *TESTBED.compare(TESTBED.rows([Outcome(cell, with_memory) for cell in printed])),
    ]
    assert len(lines) > 20
    assert [line.what for line in lines if not re.search(r"\b(fl|sfl|pipar)\b", line.what)] == []


def test_a_gain_that_is_smaller_than_the_papers_has_a_reason_from_the_rows() -> None:
    results = {"fl": timing(25.0), "sfl": timing(15.0), "pipar": {**timing(10.0), "utilisation": {"device": 0.9}}}
    rows = TIME_SMALL.rows(outcomes(Trial("mobilenetv3_small", "cifar10", "4g", devices=1), results))
    (line,) = _lines(TIME_SMALL.compare(rows), "one device: epoch of fl over epoch of pipar", "mobilenetv3_small, one")[
        :1
    ]
    assert (line.verdict, line.paper) == ("below", "10.5 to 34.6 x")
    assert (
        "an epoch of fl takes at least 134 s; here it takes at most 25 s" in line.why
    )  # 10.5 times the printed 12.8 s


def test_a_gain_that_is_larger_than_the_papers_is_reported_as_larger() -> None:
    results = {"fl": timing(90.0), "sfl": timing(15.0), "pipar": timing(10.0)}
    compared = TIME_SMALL.compare(TIME_SMALL.rows(outcomes(Trial("vgg5", "mnist", "4g"), results)))
    line = _lines(compared, "vgg5, 100 devices: epoch of fl over epoch of pipar")[0]
    assert line.verdict == "above"
    assert line.why.startswith("pipar gains more here")


@pytest.mark.parametrize(("sfl_s", "why"), [(8.0, "minimises the epoch"), (4.9, "missed the best plan")])
def test_a_server_that_is_idle_longer_with_pipar_is_counted(sfl_s: float, why: str) -> None:
    results = {
        "fl": timing(10.0, server_idle_s=9.0),
        "sfl": timing(sfl_s, server_idle_s=3.0),
        "pipar": timing(5.0, server_idle_s=4.0),
    }
    compared = IDLE_SMALL.compare(IDLE_SMALL.rows(outcomes(Trial("vgg5", "mnist", "4g"), results)))
    (count,) = _lines(compared, "cases in which the server is idle longer")
    assert (count.ours, count.verdict) == (1.0, "above")
    assert why in count.why
    assert [line.ours for line in _lines(compared, "server's idle time with fl")] == [9 / 4]


@pytest.mark.parametrize(("by_pipar", "worse"), [(0.9, 0.0), (1.1, 1.0)])
def test_devices_that_are_idle_longer_with_pipar_than_with_sfl_are_counted(by_pipar: float, worse: float) -> None:
    results = {method: {**timing(9.0), "device_idle_s": 1.0} for method in ("fl", "sfl")}
    results["fl"]["device_idle_s"] = 0.1  # it is always less there, because devices compute everything
    results["pipar"] = {**timing(5.0), "device_idle_s": by_pipar}
    compared = IDLE_SMALL.compare(IDLE_SMALL.rows(outcomes(Trial("vgg5", "mnist", "4g"), results)))
    assert [line.ours for line in _lines(compared, "cases in which the device is idle longer")] == [worse]


def test_larger_batches_are_compared_with_the_next_smaller_ones() -> None:
    found: list[Outcome] = []
    for size, seconds in ((25, 12.0), (50, 10.0), (100, 11.0)):
        trial = Trial("vgg5", "cifar10", "4g", batch_size=size)
        results = dict.fromkeys(("fl", "sfl", "pipar"), timing(seconds))
        found += outcomes(trial, results, batch_size=size)
    (line,) = _lines(BATCH_SIZE.compare(BATCH_SIZE.rows(found)), "next larger batch")
    assert (line.ours, line.verdict) == (pytest.approx(10 / 11), "below")
    assert line.why.startswith("vgg5 4g with fl from 50 to 100, vgg5 4g with sfl from 50 to 100, ")


def test_the_time_that_slow_boards_add_is_compared_between_methods() -> None:
    found = []
    for boards, more in (("alike", 0.0), ("half at half speed", 1.0)):
        results = {"fl": timing(20 + 8 * more), "sfl": timing(15 + more), "pipar": timing(10 + 2 * more)}
        found += outcomes(Trial("vgg5", "cifar10", "4g", slow=1 - more / 2), results, boards=boards)
    (line,) = _lines(HETEROGENEOUS.compare(HETEROGENEOUS.rows(found)), "slow boards add")
    assert (line.ours, line.verdict) == (4.0, "inside")


def test_the_time_that_noise_adds_is_compared_with_the_papers_largest() -> None:
    found = []
    for mechanism, more in (("none", 0.0), ("classic-dp", 1.0), ("pixeldp", 0.2)):
        results = {"fl": timing(20 + 9 * more), "sfl": timing(15 + more / 10), "pipar": timing(10 + more / 2)}
        found += outcomes(Trial("vgg5", "cifar10", "4g"), results, mechanism=mechanism)
    compared = PRIVACY.compare(PRIVACY.rows(found))
    told = {line.what.partition(":")[0]: (line.ours, line.verdict) for line in compared}
    assert told["fl, classic-dp"] == (pytest.approx(9.0), "inside")
    assert told["pipar, classic-dp"] == (pytest.approx(0.5), "above")
    assert told["sfl, pixeldp"] == (pytest.approx(0.02), "better")
    (more,) = _lines(compared, "noise adds more")
    assert (more.ours, more.verdict) == (2.0, "above")  # 0.5 and 0.1 s, and with sfl 0.1 and 0.02
    assert more.why.startswith("vgg5 cifar10 classic-dp (4g), vgg5 cifar10 pixeldp (4g): ")
    (added,) = _lines(compared, "fl, classic-dp", "with fl")
    assert set(added.run.split()) >= {
        outcome.cell.hash for outcome in found[:6] if outcome.cell.labels["method"] == "fl"
    }


def test_half_of_the_boards_are_slow() -> None:
    groups = replace(TINY, slow=0.5, devices=5).tree()["devices"]
    assert [(group["count"], group["speed"] / BOARD_SPEED) for group in groups] == [(3, 1.0), (2, 0.5)]


def test_an_interval_that_was_not_run_has_the_same_seconds_for_each_change() -> None:
    cell = BANDWIDTH.cells(True)[0]
    result = {"planning_s": 3.0, "training_s": 600.0, "epochs": 60, "searches": 9, "replans": 9}
    rows = BANDWIDTH.rows([Outcome(cell, result)])
    assert [row["minutes"] for row in rows] == [1, 5, 10, 30, 60]
    assert [row["overhead_percent"] for row in rows] == pytest.approx([0.5, 0.1, 0.05, 0.5 / 30, 0.5 / 60])
    assert [row["is_run"] for row in rows] == [True, False, False, False, False]
    told = [line.what for line in BANDWIDTH.compare(rows) if line.ours is not None]
    assert {"computed" in what for what in told if "every minute" in what} == {False}
    assert {"computed" in what for what in told if "every minute" not in what} == {True}


def test_one_server_is_enough_until_epochs_get_longer_or_memory_is_full() -> None:
    def result(seconds: float, server_bytes: float) -> dict[str, Any]:
        return {"fits": True, "seconds": seconds, "server_bytes": server_bytes, "bytes_up": 1, "bytes_down": 1}

    of = [cell for cell in SCALE.cells(False) if cell.labels["network"] == "vgg5" and cell.labels["method"] == "pipar"]
    four = [cell for cell in of if cell.labels["link"] == "4g"][:4]
    results = [result(10.0, 1e9), result(10.5, 1e9), result(10.5, 33e9), result(12.0, 1e9)]
    rows = SCALE.rows([Outcome(cell, found) for cell, found in zip(four, results, strict=True)])
    assert [row["is_enough"] for row in rows] == [True, True, False, False]
    (line,) = _lines(SCALE.compare(rows), "one server is enough")
    assert (line.ours, line.what) == (
        10.0,
        "vgg5, 4g: number of devices for which one server is enough with pipar; it is not enough for 30",
    )


def test_the_server_speed_that_a_printed_epoch_implies_is_shown() -> None:
    cells = [cell for cell in TESTBED.cells(False) if cell.labels["network"] == "vgg5"][:3]
    found = {**timing(21.0), "utilisation": {"server": 0.5}, "server_bytes": 4e9}
    (row,) = TESTBED.rows([Outcome(cell, found) for cell in cells])
    assert (row["100_s"], row["10_s"], row["1_s"], row["paper_s"]) == (21.0, 21.0, 21.0, 10.5)
    assert row["server_speed"] == pytest.approx(SERVER_SPEED * 0.5 * 21 / 10.5)
    assert row["server_GB"] == 4.0


def test_scores_are_compared_with_the_papers() -> None:
    cell = SELECTION_SMALL.cells(True)[0]
    result = {"chosen": "P=1 N=4", "chosen_s": 10.0, "best": "P=2 N=4", "best_s": 9.0, "score": 0.9}
    result |= {"planning_s": 1.0, "searched": 40, "ruled_out": 10, "paper": "P=1 N=2", "paper_score": 0.8}
    rows = SELECTION_SMALL.rows([Outcome(cell, result)])
    compared = SELECTION_SMALL.compare(rows)
    told = {line.place + line.what: line.ours for line in compared if "vgg5" not in line.what}
    every_pair = 50 * 9.0 / 5  # an iteration of each, as fast as the best
    assert (rows[0]["choosing_cpu_s"], rows[0]["training_all_s"]) == (1.0, every_pair)
    assert rows[0]["training_all/choosing"] == every_pair
    assert sorted(filter(None, told.values())) == [pytest.approx(0.1), 0.9, 10.0, every_pair]
    assert list(told.values()).count(0.0) == 3  # neither plan nor split point is the best one, nor as good


def test_every_number_of_the_papers_table_is_compared_with_ours() -> None:
    cell = SELECTION_SMALL.cells(False)[1]
    result = {"chosen": "P=1 N=12", "chosen_s": 10.0, "best": "P=2 N=11", "best_s": 9.7, "score": 0.97}
    result |= {"planning_s": 2.0, "searched": 40, "ruled_out": 10, "paper": "P=1 N=2", "paper_score": 0.8}
    compared = _lines(SELECTION_SMALL.compare(SELECTION_SMALL.rows([Outcome(cell, result)])), "vgg5, mnist, 4g+")
    told = {line.what.partition(": ")[2]: (line.paper, line.ours, line.verdict) for line in compared}
    assert told == {
        "P that is chosen": ("1", 1.0, "inside"),
        "N that is chosen": ("10", 12.0, "above"),
        "P of the best plan": ("1", 2.0, "above"),
        "N of the best plan": ("11", 11.0, "inside"),
        "score of the chosen plan": ("0.97", 0.97, "inside"),
        "seconds to choose": ("1.4 s", 2.0, "above"),
        "seconds to search all plans, each trained for an iteration": ("477 s", pytest.approx(50 * 9.7 / 6), "below"),
    }
    assert "would choose P=1 N=2 here, with a score of 0.8" in compared[1].why
    assert {line.run for line in compared} == {cell.hash}


def test_a_plan_is_optimal_if_it_is_the_best_and_as_good_if_it_is_hardly_slower() -> None:
    result = {"chosen": "P=1 N=4", "chosen_s": 10.0, "best": "P=1 N=5", "best_s": 9.96, "score": 0.996}
    result |= {"planning_s": 1.0, "searched": 40, "ruled_out": 10, "paper": "P=1 N=2", "paper_score": 0.8}
    compared = SELECTION_SMALL.compare(SELECTION_SMALL.rows([Outcome(SELECTION_SMALL.cells(True)[0], result)]))
    assert [line.ours for line in _lines(compared, "0.995 or more")] == [100.0]
    assert [line.ours for line in compared if line.paper.startswith("83.3")] == [0.0]


def test_a_chosen_plan_that_is_faster_than_all_searched_plans_is_the_best_one() -> None:
    result = {"chosen": "P=1 N=15", "chosen_s": 9.99, "best": "P=1 N=16", "best_s": 10.0, "score": 10 / 9.99}
    result |= {"planning_s": 1.0, "searched": 5, "ruled_out": 0}
    (row,) = SELECTION_SMALL.rows([Outcome(SELECTION_SMALL.cells(True)[0], result)])
    assert (row["best"], row["best_s"], row["score"]) == ("P=1 N=15", 9.99, 1.0)


@pytest.mark.parametrize("how", ["timing", "plan"])
def test_a_tiny_training_is_run_and_its_numbers_are_those_of_an_epoch(how: str) -> None:
    by_pipar, by_fl = (run_cell(how, replace(TINY, method=name).tree(), {}) for name in ("pipar", "fl"))
    assert 0 < by_pipar["seconds"] <= by_fl["seconds"]
    assert by_fl["plan"] == "P=5 N=1"
    assert (by_fl["is_whole"], by_pipar["is_whole"]) == (True, False)
    assert by_pipar["server_bytes"] > by_fl["server_bytes"]  # replicas have gradients and momentum


def test_a_network_that_does_not_fit_is_a_result() -> None:
    found = run_cell(
        "timing", replace(TINY, model="resnet101", dataset="cifar100", method="fl", batch_size=100).tree(), {}
    )
    assert found["fits"] is False
    assert "memory" in found["why"]


def test_plans_that_are_wrong_for_another_reason_are_no_result() -> None:
    with pytest.raises(PlanError, match="Split point 9 is outside"):
        run_cell("timing", replace(TINY, plan=(9, 1)).tree(), {})


@pytest.mark.slow
def test_replanning_is_counted() -> None:
    tree = replace(TINY, link={"cycle": ["4g", "wifi"], "every": "1s"}).tree()
    tree["plan"] = {"replan": True}
    found = run_cell("replan", tree, {"training_s": 5.0})
    assert found["epochs"] >= 5
    assert found["training_s"] > 0
    assert found["searches"] > 0
    assert found["planning_s"] > 0


@pytest.mark.parametrize(
    ("name", "hint"), [("time-smal", "did you mean 'time-small'?"), ("xyz", "is not an experiment;")]
)
def test_an_unknown_experiment_is_one_sentence(name: str, hint: str) -> None:
    with pytest.raises(InputError, match="choose from testbed") as raised:
        experiments(name)
    assert hint in str(raised.value)


def test_all_runs_every_experiment() -> None:
    assert experiments("all") == list(EXPERIMENTS.values())


@dataclass(frozen=True)
class MadeUp(Printed):
    """An epoch whose time is the sum of two kinds of work; nothing is simulated."""

    on_board_s: float = 0.0
    on_server_s: float = 0.0

    def predicted_s(self, board_speed: float, server_speed: float) -> float:
        return self.on_board_s / board_speed + self.on_server_s / server_speed


def test_the_fit_finds_the_speeds_that_produced_the_epochs() -> None:
    work = [(1.0, 0.1), (0.2, 2.0), (1.0, 1.0), (3.0, 0.5)]
    rows = [MadeUp(TINY, board_s / 0.25 + server_s / 4.0, board_s, server_s) for board_s, server_s in work]
    board, server = fitted_speeds(rows)
    assert (board, server) == (pytest.approx(0.25, rel=0.1), pytest.approx(4.0, rel=0.1))


@pytest.mark.slow
def test_speeds_that_are_a_quarter_off_fit_the_papers_epochs_of_vgg5_worse() -> None:
    rows = printed_epochs()
    fitted = error(rows, BOARD_SPEED, SERVER_SPEED)
    for board, server in ((1.25, 1.0), (0.8, 1.0), (1.0, 1.25), (1.0, 0.8)):
        assert error(rows, BOARD_SPEED * board, SERVER_SPEED * server) > fitted
    assert fitted < 0.35 < error(rows, 1.0, 1.0)


@pytest.mark.slow
def test_for_boards_of_two_speeds_no_chosen_plan_is_slower_over_an_epoch_than_sfl() -> None:
    # Judged by its first two iterations another plan takes 6 % less, but over an epoch 7 % more.
    job = unplanned_timing_only_job(config_from(Trial("resnet18", "cifar10", "wifi", slow=0.5).tree()))
    assert job is not None
    fleet = job.fleet()
    uncut = {member.name: Plan(1, 1) for member in fleet.members}
    chosen = search_kinds(fleet, simulate).plans
    assert simulate(fleet, chosen, None).epoch_s <= simulate(fleet, uncut, None).epoch_s
