"""`pipar plan`: its text and JSON, without torch where profiles are known, and its score."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.leakages import written
from support.waiting import PATIENCE_S

from pipar.cli import main
from pipar.cli.plan_view import _why_not, signed_percent
from pipar.job.explain import explain
from pipar.job.explanation import Option
from pipar.job.prepare import job_to_plan, prepare_timing_only, with_profile
from pipar.launch.rehearsal import rehearse
from pipar.launch.run import started_event
from pipar.methods import Plan
from pipar.planner.simulator import simulate
from pipar.profiling.cache import usable_cores
from pipar.profiling.memory import training_bytes
from pipar.profiling.operation_counts import LayerCount, known_counts
from pipar.profiling.profile import CodingTimes, LayerProfile, Profile
from pipar.settings.config_file import config_from, load_config

SMALL = ["--devices", "2", "--set", "data.samples_per_device=20", "--set", "run.batch_size=10"]
ENTRY = {"device", "split_point", "micro_batches", "window", "encoding", "up", "down"}
FIELDS = {"plans", "predicted_epoch_s", "bottleneck", "runners_up"}
ADDED = {"cuts", "groups", "server", "method", "model", "dataset", "utilisation", "estimate", "simulations", "seconds"}
SEARCHED = {"best", "chosen_epoch_s", "score", "exhaustive"}

Pipar = Callable[..., str]


def _layer(number: int, count: LayerCount) -> LayerProfile:
    """A layer with made-up times: the first are dear."""
    seconds = 0.010 / number
    return LayerProfile(
        count.name,
        (0.0002, seconds),
        (0.0004, 2 * seconds),
        count.output_bytes("float32"),
        count.parameter_bytes("float32"),
        saved_bytes=count.saved_bytes("float32"),
    )


def _profile() -> Profile:
    counts = known_counts("vgg5", "group", (1, 32, 32), 10)
    assert counts is not None
    layers = tuple(_layer(number, count) for number, count in enumerate(counts, start=1))
    return Profile("vgg5", "float32", (1, 10), layers, machine="board")


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """A file with a profile of VGG-5 on digits."""
    path = tmp_path / "board.json"
    _profile().save(path)
    return path


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def pipar(capfd: pytest.CaptureFixture[str], board: Path) -> Pipar:
    """Run `pipar plan` with the board's profile, and return what it wrote to standard output."""

    def command(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["plan", "--profile", str(board), *SMALL, *words])
        captured = capfd.readouterr()
        said = [line for line in captured.err.splitlines() if not line.startswith("pipar plan: preparing vgg5 on ")]
        assert (ended.value.code, said) == (0, [])
        return captured.out

    return command


NAMED = ["--set", "devices.profile=raspberry-pi-3b", "--set", "server.profile=i7-11850h"]


@pytest.mark.slow
@pytest.mark.parametrize("profiles", [["--profile", "board.json"], NAMED], ids=["file", "named"])
def test_a_plan_from_known_profiles_is_one_document_and_imports_no_torch(
    profiles: list[str], board: Path, tmp_path: Path
) -> None:
    script = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr));"
    script += f"from pipar.cli import main; main({['plan', *profiles, '--exhaustive', '--json', *SMALL]})"
    program = [sys.executable, "-c", script]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_S, check=True, cwd=board.parent)
    assert set(json.loads(done.stdout)) == FIELDS | ADDED | {"paper"} | SEARCHED
    assert done.stderr.split() == ["False"]
    assert not (tmp_path / "runs").exists()


def test_a_plan_has_the_documented_fields(pipar: Pipar) -> None:
    document = json.loads(pipar("--json"))
    assert set(document) == FIELDS | ADDED | {"paper"}
    assert [set(entry) for entry in document["plans"]] == [ENTRY | {"predicted_s"}] * 2
    assert [entry["device"] for entry in document["plans"]] == ["device-1", "device-2"]
    assert {entry["encoding"] for entry in document["plans"]} == {"raw"}
    assert set(document["utilisation"]) == {"device", "uplink", "server", "downlink"}
    assert document["bottleneck"] == max(document["utilisation"], key=document["utilisation"].__getitem__)
    assert all(set(option) == {"plans", "epoch_s", "relative"} for option in document["runners_up"])
    assert all(set(entry) == ENTRY for option in document["runners_up"] for entry in option["plans"])
    assert set(document["paper"]) == {"plans", "epoch_s"}


def test_a_group_of_devices_has_the_conditions_of_its_plan(pipar: Pipar, board: Path) -> None:
    document = json.loads(pipar("--json", "--set", "devices.memory=800MiB", "--link", '{up="5Mbit/s", latency="3ms"}'))
    (group,) = document["groups"]
    plan = document["plans"][0]
    assert group["devices"] == ["device-1", "device-2"]
    assert (group["machine"], group["speed"]) == (str(board), 0.05)
    assert group["link"] == {"up_bps": 5e6, "down_bps": None, "latency_s": 0.003, "cycle": [], "every_s": 0.0}
    assert group["memory_bytes"] == 800 * 2**20
    needed = training_bytes(_profile(), Plan(plan["split_point"], plan["micro_batches"], plan["window"]), 10)
    assert group["needed_bytes"] == needed
    assert {
        key: group[key] for key in ("split_point", "micro_batches", "window", "predicted_s")
    }.items() <= plan.items()
    assert group["schedule"] == "all-forward"
    assert group["utilisation"] == pytest.approx(document["utilisation"])
    assert group["bottleneck"] == document["bottleneck"]
    assert document["server"] == {"machine": str(board), "speed": 1.0, "cores": usable_cores()}


def test_groups_have_their_own_bottlenecks(board: Path, tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    slow, far = 'speed = 0.01\nlink = "unlimited"', 'speed = 1.0\nlink = {up = "100kbit/s"}'
    groups = "".join(f'[[devices]]\nname = "{name}"\n{keys}\n' for name, keys in (("slow", slow), ("far", far)))
    given = "[plan]\nsplit_point = 1\nmicro_batches = 5\nschedule = '1f1b'\nwindow = 2\n"
    path.write_text(f"[run]\nbatch_size = 10\n[data]\nsamples_per_device = 20\n{given}{groups}", "utf-8")
    document = explain(job_to_plan(with_profile(load_config(path), str(board))), rehearse).to_dict()
    assert [group["bottleneck"] for group in document["groups"]] == ["device", "uplink"]
    assert {(group["schedule"], group["window"]) for group in document["groups"]} == {("1f1b", 2)}
    for lane in ("device", "uplink", "downlink"):
        busiest = max(group["utilisation"][lane] for group in document["groups"])
        assert busiest == pytest.approx(document["utilisation"][lane])


@pytest.mark.slow
def test_a_predicted_epoch_is_as_long_as_a_timing_only_run_of_the_plan(
    pipar: Pipar, board: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    planned = json.loads(pipar("--json"))
    profiles = ["--set", f"server.profile={board}", "--set", f"devices.profile={board}", "--speed", "0.05"]
    with pytest.raises(SystemExit):
        main(["run", "--timing-only", "--json", "--epochs", "1", *profiles, *SMALL])
    run = json.loads(capfd.readouterr().out)
    assert [entry["micro_batches"] for entry in run["plans"]] == [entry["micro_batches"] for entry in planned["plans"]]
    assert planned["predicted_epoch_s"] == pytest.approx(run["epochs"][0]["seconds"], rel=1e-3)


def test_the_output_fits_80_columns_and_has_all_parts(pipar: Pipar) -> None:
    text = pipar("--exhaustive")
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for part in (
        "2 x device board.json x 0.05 10/25",
        "Predicted epoch",
        "<- bottleneck",
        "First iteration of device-",
        "; the bars above are of the whole epoch",
        "> forward < backward",
        "Runners-up",
        "The paper's estimate would have chosen",
        "T_opt / T = ",
        "simulations in",
    ):
        assert part in words


@pytest.mark.parametrize(
    ("method", "drawn"),
    [
        ("fl", True),
        ("sfl", True),
        pytest.param("sl", False, marks=pytest.mark.slow),
        pytest.param("sfl2", False, marks=pytest.mark.slow),
    ],
)
def test_every_method_has_a_plan_and_those_with_a_simulator_a_picture(method: str, drawn: bool, pipar: Pipar) -> None:
    text = pipar("--method", method, "--exhaustive")
    assert ("First iteration of" in text or "One epoch of" in text) == drawn
    assert f", method {method}," in text
    assert "T_opt / T = " in text


def test_a_memory_limit_is_shown_with_the_memory_of_the_plan(pipar: Pipar) -> None:
    enough = training_bytes(_profile(), Plan(1, 10, 3), 10)
    words = ["--set", f"devices.memory={enough}", "--split-point", "1", "--micro-batches", "10"]
    assert json.loads(pipar("--json", *words))["plans"][0]["window"] == 3
    text = pipar(*words)
    assert "1F1B(3)" in text
    assert f"{enough / 2**20:.0f} of {enough / 2**20:.0f}" in text


@pytest.mark.slow
def test_the_papers_estimate_chooses_on_request_and_the_simulations_choice_is_shown_too(pipar: Pipar) -> None:
    by_simulation, by_paper = json.loads(pipar("--json")), json.loads(pipar("--json", "--estimate", "paper"))
    assert (by_simulation["estimate"], by_paper["estimate"]) == ("simulation", "paper")
    assert set(by_paper) == FIELDS | ADDED | {"simulation"}
    assert by_paper["simulation"]["epoch_s"] == pytest.approx(by_simulation["predicted_epoch_s"])
    assert by_simulation["paper"]["epoch_s"] == pytest.approx(by_paper["predicted_epoch_s"])
    assert "by the paper's estimate" in pipar("--estimate", "paper")


def test_a_device_keeps_its_own_profile(board: Path, tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(
        '[[devices]]\nname = "own"\nprofile = "own.json"\n[[devices]]\nname = "other"\nspeed = 0.5\n', "utf-8"
    )
    config = with_profile(load_config(path), str(board))
    assert config.server.profile == str(board)
    assert [(group.profile, group.speed) for group in config.devices] == [("own.json", 1.0), (str(board), 0.5)]


def _config(board: Path, *settings: str) -> Any:
    few = ["run.batch_size=10", "data.samples_per_device=20", "devices.count=3", *settings]
    return with_profile(load_config(None, few), str(board))


def test_the_optimum_is_the_shortest_epoch_of_every_pair(board: Path) -> None:
    explained = explain(job_to_plan(_config(board)), rehearse, exhaustive=True)
    assert explained.exhaustive is not None
    best = explained.exhaustive.best
    everything = [
        simulate(
            explained.fleet, {name: replace(plan, split_point=p, micro_batches=n) for name, plan in best.plans.items()}
        )
        for p in range(1, 6)
        for n in (range(1, 11) if p < 5 else (1,))
    ]
    assert best.epoch_s == pytest.approx(min(timing.epoch_s for timing in everything))
    assert explained.exhaustive.score == pytest.approx(best.epoch_s / explained.chosen.epoch_s)
    assert 0.95 <= explained.exhaustive.score <= 1  # plans within 5 % are chosen for their dependability


def test_the_score_is_1_when_the_choice_is_the_optimum(board: Path) -> None:
    free = explain(job_to_plan(_config(board)), rehearse, exhaustive=True)
    assert free.exhaustive is not None
    best = free.exhaustive.best.plans["device-1"]
    given = [f"plan.split_point={best.split_point}", f"plan.micro_batches={best.micro_batches}"]
    explained = explain(job_to_plan(_config(board, *given)), rehearse, exhaustive=True)
    assert explained.exhaustive is not None
    assert explained.exhaustive.score == 1
    assert explained.chosen.epoch_s == pytest.approx(free.exhaustive.best.epoch_s)


def test_the_score_of_a_worse_choice_is_below_1(board: Path) -> None:
    explained = explain(job_to_plan(_config(board)), rehearse, exhaustive=True)
    assert explained.exhaustive is not None
    worse = replace(explained.exhaustive, chosen_epoch_s=explained.runners_up[-1].epoch_s)
    assert worse.score < explained.exhaustive.score <= 1


@pytest.mark.slow
def test_an_uneven_sample_makes_no_second_kind_of_device_for_a_full_search(board: Path) -> None:
    config = _config(board, "data.samples_per_device=[20, 19, 19]")
    found = explain(job_to_plan(config), rehearse, exhaustive=True).exhaustive
    assert found is not None
    assert found.grid is None
    assert len(set(found.best.plans.values())) == 1


@pytest.mark.slow
def test_a_full_search_of_several_kinds_lists_the_micro_batches_it_tried(board: Path, tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    groups = "".join(f'[[devices]]\nname = "kind{n}"\nspeed = {n / 10}\n' for n in range(1, 4))
    path.write_text(f"[run]\nbatch_size = 16\n[data]\nsamples_per_device = 32\n{groups}", "utf-8")
    explained = explain(job_to_plan(with_profile(load_config(path), str(board))), rehearse, exhaustive=True)
    found = explained.exhaustive
    assert found is not None
    assert found.grid is not None
    assert {plan.micro_batches for plan in found.best.plans.values()} <= {*found.grid, *range(1, 17)}
    assert found.score <= 1


CHANGING = ["--link", '{cycle = ["unlimited", {up = "50kbit/s", down = "50kbit/s"}], every = "60s"}']


@pytest.mark.slow
def test_links_that_change_have_plans_for_each_of_their_states(pipar: Pipar) -> None:
    document = json.loads(pipar("--json", *CHANGING))
    first, second = document["states"]
    assert (first["plans"], first["epoch_s"]) == (
        [{key: value for key, value in plan.items() if key != "predicted_s"} for plan in document["plans"]],
        document["predicted_epoch_s"],
    )
    assert [state["links"][0]["up_bps"] for state in document["states"]] == [None, 50_000]
    assert second["plans"] != first["plans"]
    assert second["epoch_s"] > first["epoch_s"]
    text = pipar(*CHANGING)
    assert "Links change every 60 s, and plans with them; the rest is for the first row" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
def test_plans_that_stay_are_timed_in_each_state_of_the_links(pipar: Pipar) -> None:
    document = json.loads(pipar("--json", *CHANGING, "--set", "plan.replan=false"))
    first, second = document["states"]
    assert first["plans"] == second["plans"]
    assert second["epoch_s"] > first["epoch_s"]
    assert "60 s, but plans stay; the rest" in pipar(*CHANGING, "--method", "sfl2", "--set", "wire.encoding=raw")
    assert "60 s, and encodings with them; the rest" in pipar(*CHANGING, "--method", "sfl2")


CODING = {name: CodingTimes(1e-5, 1e-9, 1e-5, 1e-9) for name in ("planes", "sparse-planes")}
SHARES = {"planes": (0.8, 0.85), "sparse-planes": (0.45, 0.4)}


def test_a_plan_shows_its_encodings_and_the_remaining_share_of_bytes(pipar: Pipar, board: Path) -> None:
    profile = _profile()
    layers = tuple(replace(layer, shares=SHARES) for layer in profile.layers)
    replace(profile, layers=layers, coding=CODING).save(board)
    slow = ("--method", "sfl", "--set", "devices.link={up='1Mbit/s', down='unlimited'}")
    (group,) = json.loads(pipar("--json", *slow))["groups"]
    assert (group["encoding"], group["up"], group["down"]) == ("sparse-planes/raw", "sparse-planes", "raw")
    assert (group["share_up"], group["share_down"]) == (0.45, 1.0)
    text = pipar(*slow)
    assert "sparse-planes/raw" in text
    assert "45 %/100 %" in text
    assert "encoding" not in pipar(*slow, "--set", "wire.encoding=raw").partition("Predicted")[0]


def test_the_picture_of_federated_learning_is_an_epoch_with_the_exchange_of_models(pipar: Pipar) -> None:
    text = pipar("--method", "fl", "--link", "4g")
    assert "One epoch of device-1, P=5 N=1, including the exchange of models" in text
    rows = {line.split()[0]: line for line in text.partition("One epoch of")[2].splitlines() if line.split()}
    assert rows["device"].count("=") >= 2  # a step of each iteration
    assert rows["uplink"].rstrip("·").endswith("m")
    assert rows["downlink"].endswith("m")
    assert "m model" in text


@pytest.mark.parametrize(
    ("share", "text"), [(-0.0004, "0.0 %"), (0.0004, "0.0 %"), (0.0, "0.0 %"), (-0.01, "-1.0 %"), (0.753, "+75.3 %")]
)
def test_a_difference_that_rounds_to_zero_has_no_sign(share: float, text: str) -> None:
    assert signed_percent(share) == text


@pytest.mark.parametrize(
    ("relative", "says"),
    [
        (1.01, None),
        (0.9995, "Differences up to 0.2 % are ties: the plan with fewer micro-batches wins."),
        (0.97, "Plans with a minus"),
    ],
)
def test_a_runner_up_that_seems_faster_is_explained(board: Path, relative: float, says: str | None) -> None:
    explained = explain(job_to_plan(_config(board)), rehearse)
    other = Option({name: Plan(1, 1) for name in explained.chosen.plans}, explained.chosen.epoch_s * relative)
    said = [text.plain for text in _why_not(replace(explained, runners_up=(other,)))]
    assert (says is None and said == []) or (says is not None and said[0].startswith(says))


@pytest.mark.slow
def test_groups_are_shown_in_the_order_of_the_configuration(board: Path, tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    groups = "".join(f'[[devices]]\nname = "{name}"\ncount = 2\nspeed = {n}\n' for n, name in enumerate("zma", 1))
    path.write_text(f"[run]\nbatch_size = 10\n[data]\nsamples_per_device = 20\n{groups}", "utf-8")
    explained = explain(job_to_plan(with_profile(load_config(path), str(board))), rehearse)
    assert [row.devices[0].name for row in explained.rows()] == ["z-1", "m-1", "a-1"]


@pytest.mark.slow
def test_each_of_many_devices_has_a_prediction(board: Path) -> None:
    config = with_profile(
        load_config(None, ["run.batch_size=10", "data.samples_per_device=7", "devices.count=150"]),
        str(board),
    )
    explained = explain(job_to_plan(config), rehearse)
    assert len(explained.predicted_s) == 150
    assert [len(row.devices) for row in explained.rows()] == [150]


# --- cuts that leak too much


def limit(folder: Path, *leaky: int) -> list[str]:
    """Return settings with which these cuts leak too much."""
    path = written(folder, {p: 0.8 if p in leaky else 0.2 for p in (1, 2, 3, 4)})
    return ["--set", f"privacy.leakage={path}", "--set", "privacy.max_leakage=0.5"]


@pytest.mark.parametrize("method", ["pipar", "sfl", pytest.param("sfl2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("estimate", ["simulation", "paper"])
def test_a_limit_on_leakage_moves_the_cut_and_shows_its_cost(
    method: str, estimate: str, pipar: Pipar, tmp_path: Path
) -> None:
    words = ("--method", method, "--estimate", estimate)
    free = json.loads(pipar("--json", *words))
    (best,) = {plan["split_point"] for plan in free["plans"]}
    document = json.loads(pipar("--json", *words, *limit(tmp_path, best)))
    assert best not in {plan["split_point"] for plan in document["plans"]}
    assert best not in {plan["split_point"] for option in document["runners_up"] for plan in option["plans"]}
    privacy = document["privacy"]
    assert (privacy["max_leakage"], privacy["ruled_out"]) == (0.5, [{"split_point": best, "leakage": 0.8}])
    assert privacy["without"]["epoch_s"] == pytest.approx(free["predicted_epoch_s"])
    assert {plan["split_point"] for plan in privacy["without"]["plans"]} == {best}
    assert privacy["relative"] == pytest.approx(document["predicted_epoch_s"] / free["predicted_epoch_s"])


@pytest.mark.slow
def test_the_output_names_ruled_out_cuts_and_their_cost(pipar: Pipar, tmp_path: Path) -> None:
    text = " ".join(pipar(*limit(tmp_path, 1, 2, 3, 4)).split())
    assert "privacy.max_leakage = 0.5 rules out P=1 (leaks 0.80), P=2 (leaks 0.80), P=3 (leaks 0.80), P=4" in text
    assert "P=5 N=1" in text or " 5 1 " in text  # the whole network on the device gives no activations away
    assert "rules out no cut." in " ".join(pipar(*limit(tmp_path)).split())
    assert ", at no cost:" in " ".join(pipar(*limit(tmp_path, 4), "--split-point", "1").split())


@pytest.mark.slow
def test_a_limit_below_the_guess_is_reported_as_unreachable(pipar: Pipar, tmp_path: Path) -> None:
    path = written(tmp_path, dict.fromkeys((1, 2, 3, 4), 0.8), guess=0.747)
    words = ["--set", f"privacy.leakage={path}", "--set"]
    said = "It is below 0.747, the score of the mean of other images, without any activation"
    assert said in " ".join(pipar(*words, "privacy.max_leakage=0.5").split())
    assert "mean of other images" not in " ".join(pipar(*words, "privacy.max_leakage=0.75").split())


def test_the_training_keeps_the_limit_of_the_plan(board: Path, tmp_path: Path) -> None:
    settings = [*SMALL[3::2], f"devices.profile={board}", f"server.profile={board}", "devices.speed=0.05"]
    free = prepare_timing_only(load_config(None, settings), rehearse)
    assert free is not None
    best = next(iter(free.plans.values())).split_point
    limited = prepare_timing_only(load_config(None, [*settings, *limit(tmp_path, best)[1::2]]), rehearse)
    assert limited is not None
    assert best not in limited.split_points.values()
    assert limited.fleet().leaky_cuts == {best}
    # It reports this if its method has a cut to choose.
    assert started_event(limited, tmp_path).leakage == f"privacy.max_leakage = 0.5 rules out P={best} (leaks 0.80)."
    assert ". It is below 0.700, the score of" in started_event(replace(limited, leakage_guess=0.7), tmp_path).leakage
    fl = limited.config.model_copy(update={"run": limited.config.run.model_copy(update={"method": "fl"})})
    assert started_event(replace(limited, config=fl), tmp_path).leakage == ""
    assert started_event(free, tmp_path).leakage == ""


def test_a_network_of_ones_own_is_planned_without_the_files_of_a_named_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPAR_DATA", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)
    layers = "nn.Conv2d(1, 4, 5), nn.Flatten(), nn.Linear(4 * 24 * 24, 10)"
    (tmp_path / "own_net_of_a_plan.py").write_text(
        f"from torch import nn\ndef net():\n    return nn.Sequential({layers})\n"
    )
    tree = {"data": {"name": "mnist", "samples_per_device": 30}, "model": {"factory": "own_net_of_a_plan:net"}}
    machines = {"server": {"profile": "i7-11850h"}, "devices": [{"profile": "raspberry-pi-3b", "count": 2}]}
    explained = explain(job_to_plan(config_from({**tree, **machines})), rehearse)
    assert explained.job.sizes == {"device-1": 30, "device-2": 30}
    assert explained.job.layers == 3
    assert explained.job.dataset == "mnist"
