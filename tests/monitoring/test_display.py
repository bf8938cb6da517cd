"""The terminal during a run: numbers from events, lines within 80 columns, and nothing if quiet."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.interleaving import has_step

from pipar.events import (
    BudgetSpent,
    EpochResult,
    EquivalenceChanged,
    Event,
    Joined,
    Preparing,
    Progress,
    Refused,
    ReplanFailed,
    Replanned,
    Started,
    Starting,
    TrackerFailed,
)
from pipar.monitoring.display import Display, clock_text, is_live
from pipar.monitoring.epoch_lines import epoch_header, epoch_line
from pipar.monitoring.progress import TrainingProgress
from pipar.settings.config_file import config_from
from pipar.settings.wording import plans_text, setting_text

STARTED = Started(
    folder="runs/x",
    method="pipar",
    epochs=3,
    cores=2,
    plans={"device-1": "P=2 N=3", "device-2": "P=2 N=3"},
    samples={"device-1": 100, "device-2": 100},
    iterations={"device-1": 4, "device-2": 4},
)
EPOCH = EpochResult(
    epoch=1,
    seconds=4.0,
    samples=200,
    train_loss=2.25,
    val_loss=2.125,
    val_accuracy=0.5,
    bytes_up=10_000_000,
    bytes_down=1_000_000,
    server_idle_s=3.5,
    device_idle_s=0.25,
    bound_s=3.0,
    efficiency=0.75,
    validation_s=0.1,
)


def _report(owner: str, iteration: int, at_s: float, epoch: int = 1, **busy_s: float) -> Progress:
    return Progress(owner, epoch, iteration, 100, 2.25, at_s, {lane.replace("_", " "): s for lane, s in busy_s.items()})


def _progress(*events: Event) -> TrainingProgress:
    progress = TrainingProgress()
    for event in (STARTED, *events):
        progress.take(event)
    return progress


def test_utilisation_is_busy_time_between_reports_over_the_time_between_them() -> None:
    progress = _progress(
        _report("device-1", 1, 10.0, compute=5.0, uplink=1.0),
        _report("device-1", 2, 12.0, compute=6.5, uplink=2.0),
        _report("device-2", 1, 10.0, compute=5.0, uplink=1.0),
        _report("device-2", 2, 12.0, compute=5.5, uplink=2.0),
    )
    assert progress.utilisation() == {"device": 0.5, "uplink": 0.5, "server": None, "downlink": None}


def test_the_server_is_the_mean_of_its_cores_also_of_those_that_never_worked() -> None:
    progress = _progress(
        _report("server", 1, 10.0, core_0=1.0, downlink=0.5),
        _report("server", 2, 14.0, core_0=3.0, downlink=1.5),
    )
    shares = progress.utilisation()
    assert (shares["server"], shares["downlink"]) == (0.25, 0.25)


def test_one_report_is_not_enough_for_utilisation() -> None:
    assert set(_progress(_report("device-1", 1, 10.0, compute=5.0)).utilisation().values()) == {None}


def test_the_place_is_that_of_the_furthest_device_and_the_share_that_of_all() -> None:
    progress = _progress(_report("device-1", 4, 10.0), _report("device-2", 2, 10.0))
    assert progress.place() == (1, 4, 4, 0.75)
    progress.take(_report("device-1", 1, 11.0, epoch=2))
    assert progress.place() == (2, 1, 4, 0.125)


def test_samples_per_second_add_up_over_the_devices() -> None:
    progress = _progress(_report("device-1", 1, 10.0), _report("device-2", 1, 10.0))
    assert progress.samples_per_s() is None
    progress.take(_report("device-1", 3, 12.0))
    progress.take(_report("device-2", 2, 11.0))
    assert progress.samples_per_s() == 25.0 + 25.0


def test_a_new_run_starts_from_nothing() -> None:
    progress = _progress(_report("device-1", 4, 10.0), EPOCH)
    progress.take(STARTED)
    assert (progress.last, progress.running, progress.place()) == (None, False, (1, 0, 0, 0.0))


def test_a_line_of_an_epoch_has_its_values_under_their_titles_within_80_columns() -> None:
    assert epoch_header() == "epoch  seconds samples/s train loss val loss val acc idle s: server device  eff."
    assert epoch_line(EPOCH) == "    1     4.00      50.0     2.2500   2.1250  50.0 %           3.50   0.25  75 %"
    private = "epoch  seconds   epsilon train loss val loss val acc idle s: server device  eff."
    assert epoch_header(private=True) == private
    assert epoch_line(replace(EPOCH, epsilon=3.14159)).split()[2] == "3.1416"
    long = replace(EPOCH, epoch=1000, seconds=1234567.89, server_idle_s=1234567.89, device_idle_s=123456.78)
    worse = replace(long, train_loss=1e30, val_loss=-1.5e30, samples=10**15, val_accuracy=1.0, efficiency=1.0)
    for result in (long, worse):
        assert len(epoch_line(result)) <= 80
        assert len(epoch_line(result).replace(" %", "").split()) == 9  # no two of them touch


def test_a_run_without_mathematics_has_no_losses() -> None:
    assert epoch_line(replace(EPOCH, train_loss=None, val_loss=None, val_accuracy=None)).split().count("-") == 3


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ({"count": 4}, "4 devices, link 10/25 Mbit/s, speed 0.05 of this machine"),
        ({"link": "unlimited"}, "1 device, link unlimited, speed 0.05 of this machine"),
        ({"link": {"up": "5Mbit/s", "latency": "20ms"}}, "1 device, link 5/unlimited Mbit/s + 20 ms, speed 0.05 of"),
        (
            {"link": {"cycle": ["4g", "wifi"], "every": "60s"}},
            "link 10/25 Mbit/s, then 50/50 Mbit/s, each for 60 s, speed",
        ),
        (
            {"name": "pi", "profile": "pi.json", "speed": 0.5},
            "pi: 1 device, link 10/25 Mbit/s, profile pi.json, speed 0.5 of that profile",
        ),
    ],
)
def test_emulated_devices_are_described_in_words(group: dict[str, object], says: str) -> None:
    assert says in setting_text(config_from({"devices": [group]}))


def test_plans_of_many_devices_are_grouped() -> None:
    assert plans_text(["P=2 N=3"] * 100) == "P=2 N=3"
    assert plans_text(["P=2 N=3", "P=1 N=9", "P=2 N=3"]) == "1 x P=1 N=9, 2 x P=2 N=3"


def _shown(*events: Event, terminal: bool, quiet: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, height=24, color_system=None, legacy_windows=False)
    with Display(console, quiet=quiet, emulated="4 devices") as display:
        for event in events:
            display.observe(event)
        if terminal:
            console.print(display._picture())
    return out.getvalue()


RUN = (Preparing("Measuring the layers", 0.5), STARTED, Joined("device-1", 1), _report("device-1", 1, 1.0), EPOCH)


def test_without_a_terminal_there_are_plain_lines_only() -> None:
    shown = _shown(*RUN, terminal=False)
    assert shown.splitlines() == [
        "Emulated: 4 devices.",
        "",
        "pipar: PiPar, P=2 N=3",
        epoch_header(),
        epoch_line(EPOCH),
    ]


def test_new_plans_have_a_line() -> None:
    plans = {"device-1": {"split_point": 1, "micro_batches": 9, "window": 4}}
    new = Replanned(2, plans, "device-1 up from 10 to 4.2 Mbit/s")
    shown = _shown(*RUN, new, ReplanFailed("New plans could not be chosen: no."), terminal=False)
    assert shown.splitlines()[-3:] == [
        epoch_line(EPOCH),
        "New plans from epoch 2 on: P=1 N=9 1f1b(4) (device-1 up from 10 to 4.2 Mbit/s)",
        "New plans could not be chosen: no.",
    ]


def test_reasons_why_weights_are_not_exact_have_a_line() -> None:
    private = replace(STARTED, equivalence_reasons=("noise on updates",))
    changed = EquivalenceChanged(1, ("batch statistics", "noise on updates"))
    shown = _shown(*RUN[:1], private, *RUN[2:], changed, terminal=False)
    assert "\nweights are statistical: noise on updates\n" in shown
    assert "\nAfter epoch 1, weights are statistical: batch statistics, noise on updates\n" in shown
    assert "weights are" not in _shown(*RUN, terminal=False)


def test_new_plans_are_shown_below_the_last_epoch_of_the_old_ones() -> None:
    second = replace(EPOCH, epoch=2)
    new = Replanned(3, {"device-1": {"split_point": 1, "micro_batches": 9, "window": 0}})
    shown = _shown(*RUN[:-1], new, EPOCH, second, replace(EPOCH, epoch=3), terminal=False)
    assert shown.splitlines()[-4:] == [
        epoch_line(EPOCH),
        epoch_line(second),
        "New plans from epoch 3 on: P=1 N=9",
        epoch_line(replace(EPOCH, epoch=3)),
    ]
    assert "New plans" not in _shown(*RUN, new, STARTED, EPOCH, second, terminal=False)


def test_ruled_out_cuts_are_shown_above_the_epochs() -> None:
    words = "privacy.max_leakage = 0.5 rules out P=1 (leaks 0.90)."
    lines = _shown(*RUN[:1], replace(STARTED, leakage=words), *RUN[2:], terminal=False).splitlines()
    assert lines.index(words) == lines.index(epoch_header()) - 1
    assert "max_leakage" not in _shown(*RUN, terminal=False)


def test_a_spent_budget_is_explained_below_the_last_epoch() -> None:
    spent, second = BudgetSpent(2, "device-1", 4.3772, 4.0), replace(EPOCH, epoch=2)
    shown = _shown(*RUN[:-1], EPOCH, spent, second, terminal=False)
    assert shown.splitlines()[-2:] == [epoch_line(second), spent.reason]
    assert _shown(*RUN, replace(spent, epoch=1), terminal=False).splitlines()[-1].endswith("target_epsilon is 4.")


def test_before_a_run_a_log_names_what_starts_and_a_terminal_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CI", raising=False)
    starting = Starting("run", "vgg5 on digits with pipar")
    assert _shown(starting, RUN[0], terminal=False) == "pipar run: preparing vgg5 on digits with pipar\n"
    assert _shown(starting, RUN[0], terminal=False, quiet=True) == ""
    assert "vgg5" not in _shown(starting, RUN[0], terminal=True)


def test_a_long_preparation_logs_its_progress_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))  # each reading of the clock is a second later
    monkeypatch.setattr("pipar.monitoring.display.time", SimpleNamespace(monotonic=lambda: next(now)))
    events = [Preparing(f"Trying every plan: {n} of at most 30 combinations", n / 30) for n in range(1, 31)]
    lines = _shown(*events, terminal=False).splitlines()
    assert 2 <= len(lines) <= 3
    assert lines[0] == "Trying every plan: 10 of at most 30 combinations (33 %, 0:12)"
    assert _shown(*events, terminal=False, quiet=True) == ""


def test_quiet_prints_nothing() -> None:
    assert _shown(*RUN, terminal=False, quiet=True) == ""


def test_a_failed_tracker_is_reported_even_if_quiet() -> None:
    failed = TrackerFailed("mlflow", "OSError: no\nspace")
    said = "Tracker mlflow is off, training continues without it: OSError: no\\nspace\n"
    assert _shown(failed, terminal=False, quiet=True) == said


def test_a_program_that_may_not_join_is_reported_even_if_quiet() -> None:
    refused = Refused("a device at 127.0.0.1", "The server does not\nknow this token.")
    said = "a device at 127.0.0.1 was refused: The server does not\\nknow this token.\n"
    assert _shown(refused, terminal=False, quiet=True) == said


@pytest.mark.parametrize(
    ("environment", "console", "live"),
    [
        ({}, {"force_terminal": True}, True),
        ({}, {"force_terminal": False}, False),
        ({"CI": "true"}, {"force_terminal": True}, False),
        ({"FORCE_COLOR": "1"}, {"force_terminal": True}, False),  # a file that is to have colours
        ({"NO_COLOR": "1"}, {"force_terminal": True}, True),
    ],
)
def test_only_a_terminal_outside_of_ci_has_a_live_part(
    environment: dict[str, str], console: dict[str, bool], live: bool
) -> None:
    around = {"TERM": "xterm", **environment}
    assert is_live(Console(file=io.StringIO(), _environ=around, **console), around) is live


def test_a_terminal_without_a_cursor_has_no_live_part() -> None:
    around = {"TERM": "dumb"}
    assert not is_live(Console(file=io.StringIO(), force_terminal=True, _environ=around), around)


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0:00"), (65.4, "1:05"), (3600, "1:00:00"), (43259, "12:00:59")])
def test_durations_are_shown_as_on_a_clock(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([], ["Preparing"]),
        (RUN[:1], ["Measuring the layers", "50 %"]),
        (RUN[:3], ["1 of 2 devices joined"]),
        (RUN, ["epoch 1/3  iteration 1/4", "loss 2.250", "val acc 50.0 %", "device", "uplink", "server", "downlink"]),
    ],
)
def test_a_terminal_shows_the_progress_of_the_run(events: list[Event], says: list[str]) -> None:
    shown = _shown(*events, terminal=True)
    for words in says:
        assert words in shown
    assert max(len(line) for line in shown.replace("\r", "\n").splitlines() if "\x1b" not in line) <= 80


# --- the screen is drawn by a separate thread


def _look_while_reporting(step: int) -> bool:
    progress = _progress()

    def look() -> None:
        progress.place()
        progress.samples_per_s()
        progress.utilisation()

    return has_step(step, TrainingProgress.take.__code__, lambda: progress.take(_report("device-1", 1, 10.0)), look)


def _begin_while_drawing(step: int) -> bool:
    display = Display(Console(file=io.StringIO()))
    display.observe(RUN[0])
    return has_step(step, Display._picture.__code__, display._picture, lambda: display.observe(STARTED))


@pytest.mark.parametrize("run", [_look_while_reporting, _begin_while_drawing])
def test_events_may_arrive_at_any_moment_of_drawing(run: Callable[[int], bool]) -> None:
    steps = next(step for step in range(1, 10_000) if not run(step))
    assert steps > 20


def test_the_title_says_when_a_network_is_not_cut() -> None:
    plans = {"plans": {"a": "P=5 N=1"}, "samples": {"a": 40}, "iterations": {"a": 4}}
    shown = _shown(Started("runs/x", "pipar", 4, 2, **plans, layers=5), terminal=False)
    assert "pipar: PiPar, P=5 N=1 (the whole network on the device: federated learning)\n" in shown
    one_stage = {**plans, "plans": {"a": "P=1 N=1"}}
    shown = _shown(Started("runs/x", "fl", 4, 2, **one_stage, layers=1), terminal=False)
    assert "fl: federated learning, whole network N=1\n" in shown


def test_the_title_of_a_long_metric_shows_that_it_is_cut() -> None:
    titles = {name: epoch_header(metric=name)[44:52].strip() for name in ("mae", "perplex", "coverage")}
    assert titles == {"mae": "val mae", "perplex": "perplex", "coverage": "covera…"}
