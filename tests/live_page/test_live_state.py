"""The state of the live page, from events alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from pipar.events import (
    Away,
    Back,
    Drawn,
    Dropped,
    EpochResult,
    Event,
    Failed,
    Heard,
    Joined,
    Left,
    Lost,
    Preparing,
    Progress,
    Replanned,
    Resumed,
    RoundOver,
    Silent,
    Started,
    Stopping,
    Waiting,
)
from pipar.live_page.state import MOST_ROWS, LiveState
from pipar.monitoring.progress import TimeEstimate


def started(*names: str, epochs: int = 4, iterations: int = 10) -> Started:
    return Started(
        folder="runs/it",
        method="pipar",
        epochs=epochs,
        cores=2,
        plans=dict.fromkeys(names, "P=2 N=4"),
        samples=dict.fromkeys(names, 100),
        iterations=dict.fromkeys(names, iterations),
    )


def progress(owner: str, iteration: int, at_s: float, *, epoch: int = 1, samples: int = 100, **busy: float) -> Progress:
    return Progress(owner, epoch, iteration, samples, 2.0 - 0.1 * iteration, at_s, busy)


def result(epoch: int, **changed: Any) -> EpochResult:
    numbers = dict.fromkeys(
        ("bytes_up", "bytes_down", "server_idle_s", "device_idle_s", "bound_s", "efficiency", "validation_s"), 0
    )
    values = {"seconds": 2.0, "samples": 200, "train_loss": 1.5, "val_loss": 1.6, "val_accuracy": 0.5, **numbers}
    return EpochResult(epoch=epoch, **{**values, **changed})


def picture(*events: Event, at: float = 1000.0, every: float = 1.0) -> dict[str, Any]:
    """Return the shown state after these events, one per second."""
    state = LiveState()
    for number, event in enumerate(events):
        state.take(event, at + every * number)
    return state.picture()


def device(shown: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in shown["devices"] if row["name"] == name)


def states(shown: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["state"] for row in shown["devices"]}


# --- the run


def test_the_first_state_is_preparing() -> None:
    shown = picture()
    assert (shown["phase"], shown["run"], shown["devices"], shown["ends_at"]) == ("preparing", None, [], None)
    json.dumps(shown, allow_nan=False)


def test_a_preparation_shows_its_progress_until_the_training_starts() -> None:
    assert picture(Preparing("measuring", 0.25))["preparing"] == ["measuring", 0.25]
    assert picture(Preparing("measuring", 0.25), started("a"))["preparing"] is None


def test_awaited_devices_are_counted_as_they_join() -> None:
    events: list[Event] = [Waiting(0, 2), Joined("a", 1)]
    assert picture(*events)["waiting"] == [1, 2]
    assert picture(*events, Joined("b", 2))["waiting"] is None


def test_a_running_training_has_its_epoch_loss_rate_and_lanes() -> None:
    shown = picture(
        started("a", "b"),
        progress("a", 1, 10.0, compute=1.0, uplink=0.0),
        progress("b", 1, 10.0, compute=1.0, uplink=0.0),
        progress("a", 3, 12.0, compute=2.0, uplink=0.5),
        progress("b", 5, 14.0, compute=3.0, uplink=4.0),
    )
    assert (shown["phase"], shown["method"], shown["run"]) == ("training", "pipar", "it")
    assert (shown["epoch"], shown["epochs"], shown["iteration"], shown["iterations"]) == (1, 4, 5, 10)
    assert shown["share"] == pytest.approx(0.4)
    assert shown["done"] == pytest.approx(0.1)
    assert shown["loss"] == pytest.approx(1.5)
    assert shown["losses"] == pytest.approx([1.9, 1.9, 1.7, 1.5])
    assert shown["samples_per_s"] == pytest.approx(10.0 + 10.0)
    assert shown["lanes"]["device"] == pytest.approx(0.5)
    assert device(shown, "a")["uplink"] == pytest.approx(0.25)
    assert device(shown, "b")["uplink"] == pytest.approx(1.0)


def test_the_accuracy_is_that_of_the_last_validated_epoch() -> None:
    assert picture(started("a"), result(1), result(2, val_accuracy=0.75))["accuracy"] == 0.75


def test_lanes_without_reports_show_the_last_epoch() -> None:
    shown = picture(started("a"), result(1, utilisation={"device": 0.25}))
    assert (shown["lanes"]["device"], shown["lanes_before"]) == (None, {"device": 0.25})


def test_a_diverged_training_is_strict_json() -> None:
    shown = picture(started("a"), Progress("a", 1, 1, 100, math.nan, 1.0), result(1, val_accuracy=math.nan))
    assert (shown["loss"], shown["losses"], shown["accuracy"]) == (None, [None], None)
    json.dumps(shown, allow_nan=False)


def test_a_second_run_begins_with_nothing_of_the_first() -> None:
    shown = picture(started("a", "b"), progress("a", 9, 1.0), RoundOver(1, {"a": 100}), started("c"))
    assert states(shown) == {"c": "expected"}
    assert (shown["epoch"], shown["done"], shown["losses"]) == (1, 0.0, [])


@pytest.mark.parametrize(
    ("events", "trouble", "phase"),
    [
        ([], "", "over"),
        ([], "no memory", "failed"),
        ([Failed("no disk")], "", "failed"),
        ([Stopping("it was asked to")], "", "stopped"),
    ],
)
def test_the_last_phase_shows_how_the_run_ended(events: list[Event], trouble: str, phase: str) -> None:
    state = LiveState()
    for event in [started("a"), *events]:
        state.take(event, 1.0)
    state.end(2.0, trouble)
    assert state.picture()["phase"] == phase
    assert trouble in state.picture()["trouble"]


def test_the_log_keeps_the_last_sentences() -> None:
    shown = picture(started("a"), *[Joined(f"pi-{number}", number) for number in range(100)], progress("a", 1, 1.0))
    assert len(shown["log"]) == 40
    assert shown["log"][-1] == {"at": 1100.0, "level": "info", "text": "pi-99 joined (99 devices)"}


def test_a_sentence_about_a_thousand_devices_is_shortened() -> None:
    plan = {"split_point": 3, "micro_batches": 8}
    (line,) = picture(Replanned(2, {f"device-{number}": plan for number in range(1000)}))["log"]
    assert line["text"].startswith("new plans from round 2 on")
    assert len(line["text"]) == 400
    assert line["text"].endswith("…")


def test_a_report_after_the_request_to_stop_does_not_hide_it() -> None:
    assert picture(started("a"), Stopping("it was asked to"), progress("a", 1, 1.0))["phase"] == "stopping"


def test_a_name_with_control_characters_is_shown_escaped() -> None:
    assert [row["name"] for row in picture(Joined("a\nb\x1b[2J", 1))["devices"]] == [r"a\nb\x1b[2J"]


# --- devices


def test_devices_of_a_run_are_expected_join_and_train() -> None:
    events: list[Event] = [started("a", "b"), Joined("a", 1)]
    assert states(picture(*events)) == {"a": "joined", "b": "expected"}
    assert states(picture(*events, progress("a", 1, 1.0))) == {"a": "training", "b": "expected"}


@pytest.mark.parametrize(
    ("event", "state"),
    [
        (Away("a", 30.0), "away"),
        (Lost("a", "its link broke"), "lost"),
        (Left("a"), "left"),
        (Back("a", 2.5), "back"),
    ],
)
def test_an_event_sets_the_state_of_its_device_and_its_start(event: Event, state: str) -> None:
    shown = picture(started("a", "b"), Joined("a", 1), Joined("b", 2), progress("a", 1, 1.0), event)
    assert (device(shown, "a")["state"], device(shown, "a")["since"]) == (state, 1004.0)
    assert device(shown, "b")["state"] == "joined"


def test_a_silent_device_gets_its_former_state_back_when_it_responds() -> None:
    events: list[Event] = [started("a", "b"), Joined("a", 1), progress("a", 1, 1.0), Silent("a", 1.5)]
    shown = picture(*events)
    assert (device(shown, "a")["state"], device(shown, "a")["since"]) == ("silent", 1001.5)
    assert shown["states"] == {"silent": 1, "expected": 1}
    again = picture(*events, Heard("a", 3.0))
    assert (device(again, "a")["state"], device(again, "a")["since"]) == ("training", 1002.0)
    assert device(picture(*events, Away("a", 30.0)), "a")["state"] == "away"


def test_since_is_the_start_of_a_state_and_not_the_last_message() -> None:
    shown = picture(started("a"), progress("a", 1, 1.0), progress("a", 2, 2.0), progress("a", 3, 3.0))
    assert device(shown, "a")["since"] == 1001.0


def test_a_device_has_a_deadline_only_while_it_is_away() -> None:
    away = picture(started("a"), Joined("a", 1), Away("a", 30.0))
    assert device(away, "a")["until"] == 1032.0
    assert device(picture(started("a"), Away("a", 30.0), Back("a", 1.0)), "a")["until"] is None


def test_in_a_deployment_devices_present_at_the_start_of_a_round_train_and_later_ones_wait() -> None:
    events = [Waiting(0, 2), Joined("a", 1), Joined("b", 2), started("a", "b"), Joined("late", 3)]
    assert states(picture(*events)) == {"a": "training", "b": "training", "late": "joined"}
    over = [*events, Lost("b", "gone"), RoundOver(1, {"a": 100}), Dropped("b", 1, "gone")]
    assert states(picture(*over)) == {"a": "training", "b": "lost", "late": "training"}
    assert "excluded from round 1" in device(picture(*over), "b")["note"]


def test_in_a_deployment_the_servers_reports_give_the_progress() -> None:
    shown = picture(
        Joined("a", 1),
        Joined("b", 2),
        started("a", "b"),
        progress("server", 1, 10.0, samples=20),
        progress("server", 5, 12.0, samples=100),
    )
    assert (shown["iteration"], shown["share"], shown["samples_per_s"]) == (5, 0.5, 40.0)
    further = picture(
        started("a", "b"),
        progress("server", 10, 14.0, samples=200),
        RoundOver(1, {"a": 100, "b": 100}),
        progress("server", 1, 16.0, epoch=2, samples=250),
    )
    assert (further["epoch"], further["share"], further["done"]) == (2, 0.25, pytest.approx(1.25 / 4))


def test_in_a_deployment_the_servers_reports_give_the_progress_of_each_device() -> None:
    report = Progress("server", 2, 7, 100, 1.0, 10.0, {}, {"a": (2, 7), "b": (2, 3), "new": (0, 0)})
    shown = picture(Joined("a", 1), Joined("b", 2), started("a", "b"), Joined("new", 3), report)
    places = {row["name"]: (row["epoch"], row["iteration"]) for row in shown["devices"]}
    assert places == {"a": (2, 7), "b": (2, 3), "new": (None, 0)}


def test_a_resumed_training_keeps_its_progress() -> None:
    shown = picture(Resumed(3), Joined("a", 1), started("a"))
    assert (shown["epoch"], shown["done"]) == (4, 0.75)


def test_threads_of_devices_are_shown() -> None:
    begun = replace(started("a", "b"), threads={"a": 4, "b": 1})
    document = picture(begun, Joined("c", 3, threads=2))
    assert [device(document, name)["threads"] for name in "abc"] == [4, 1, 2]


def test_new_plans_are_shown() -> None:
    plan = {"split_point": 3, "micro_batches": 8}
    assert device(picture(started("a"), Replanned(2, {"a": plan})), "a")["plan"] == "P=3 N=8"


def test_with_too_many_devices_those_in_trouble_are_shown() -> None:
    names = [f"d{number:03}" for number in range(MOST_ROWS + 50)]
    shown = picture(started(*names), *[Joined(name, 1) for name in names], Lost("d149", "x"), Away("d148", 1.0))
    assert len(shown["devices"]) == MOST_ROWS
    assert {"d148", "d149"} <= {row["name"] for row in shown["devices"]}
    assert shown["unseen"] == 50
    assert shown["states"] == {"lost": 1, "away": 1, "joined": 148}


# --- the remaining time


def test_the_end_is_predicted_from_the_share_of_the_first_epoch() -> None:
    estimate = TimeEstimate()
    estimate.note(0.1, 100.0)
    assert estimate.ends_at(4) is None
    estimate.note(0.6, 105.0)  # an epoch in ten seconds
    assert estimate.ends_at(4) == pytest.approx(105.0 + 34.0)


def test_reports_that_arrive_together_are_not_taken_for_speed() -> None:
    events = [started("a", "b", epochs=2), Joined("a", 1), Joined("b", 2)]
    first = [progress("a", 1, 1.0), progress("b", 1, 1.0)]  # a tenth of an epoch in the ten seconds since they joined
    state = LiveState()
    for event, at in zip([*events, *first], [0.0, 1.0, 2.0, 12.0, 12.01], strict=True):
        state.take(event, at)
    assert state.picture()["ends_at"] == pytest.approx(12.01 + 19 * 10.01)


def test_the_end_is_predicted_from_the_last_epochs_only() -> None:
    estimate = TimeEstimate()
    for epoch in range(10):
        estimate.note(float(epoch), 100.0 * epoch)
    for epoch in range(10, 16):
        estimate.note(float(epoch), 900.0 + (epoch - 9))  # a hundred times as fast
    assert estimate.ends_at(20) == pytest.approx(906.0 + 5.0)


def test_progress_that_seems_to_go_back_is_ignored() -> None:
    estimate = TimeEstimate()
    for done, at in ((0.0, 0.0), (1.0, 10.0), (0.9, 11.0)):
        estimate.note(done, at)
    assert estimate.ends_at(2) == pytest.approx(20.0)


def test_a_device_that_is_not_drawn_for_a_round_says_so() -> None:
    names = ("a", "b", "c")
    begun = [started(*names), *(Joined(name, 1) for name in names)]
    states = {row["name"]: row["state"] for row in picture(*begun, Drawn(1, ("b",), 3))["devices"]}
    assert states == {"a": "idle", "b": "training", "c": "idle"}
    states = {row["name"]: row["state"] for row in picture(*begun, Drawn(1, ("b",), 3), Drawn(2, ("a",), 3))["devices"]}
    assert states == {"a": "training", "b": "idle", "c": "idle"}
