"""What is logged: one line an event, in plain English or as JSON, whatever a peer puts into it."""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any, get_args

import pytest

from pipar.events import (
    Away,
    Back,
    Barred,
    BudgetSpent,
    Connected,
    Connecting,
    DevicesEvaluated,
    Drawn,
    Dropped,
    EndedByCallback,
    EpochResult,
    EquivalenceChanged,
    Event,
    Expiring,
    Failed,
    Heard,
    Joined,
    Left,
    Listening,
    Lost,
    MeasuredBusy,
    NotEvaluated,
    NotKept,
    Pictured,
    Preparing,
    Progress,
    Reconnecting,
    Refused,
    Reloaded,
    ReloadFailed,
    ReplanFailed,
    Replanned,
    ReportFailed,
    ReportWritten,
    Resumed,
    RoundOver,
    RoundRestarted,
    Saved,
    SaveFailed,
    Silent,
    Started,
    Starting,
    Stopping,
    TimedByPrograms,
    TimeoutsChosen,
    TrackerFailed,
    Trained,
    Waiting,
    Welcomed,
    tell_all,
)
from pipar.monitoring.event_text import EventDescriber
from pipar.monitoring.logs import LogFormat, log_observer, logged

STARTED = Started(
    folder="runs/x",
    method="pipar",
    epochs=3,
    cores=2,
    plans={"pi-1": "P=2 N=3"},
    samples={f"pi-{number}": 100 for number in range(1, 6)},
    iterations={"pi-1": 4},
)
EPOCH = EpochResult(
    epoch=7,
    seconds=412.31,
    samples=500,
    train_loss=1.2344,
    val_loss=1.5,
    val_accuracy=0.625,
    bytes_up=12_000_000,
    bytes_down=3_400,
    server_idle_s=3.5,
    device_idle_s=0.25,
    bound_s=3.0,
    efficiency=0.75,
    validation_s=0.1,
)
PLANS = {"pi-1": {"split_point": 1, "micro_batches": 9, "window": 4, "up": "planes", "down": "sparse"}}

#: Every event once, and its sentence.
SAID: list[tuple[Event, str]] = [
    (
        Starting("server", "vgg5 on digits", "0.0.0.0:50051"),
        "pipar server: preparing vgg5 on digits; will listen on 0.0.0.0:50051",
    ),
    (
        Starting("device", "vgg5 on digits as pi-1", "server:50051"),
        "pipar device: preparing vgg5 on digits as pi-1; server server:50051",
    ),
    (Starting("run", "vgg5 on digits with fl"), "pipar run: preparing vgg5 on digits with fl"),
    (Preparing("Measuring the layers", 0.5), "debug: Measuring the layers: 50%"),
    (MeasuredBusy("The profile is doubtful."), "warning: The profile is doubtful."),
    (Pictured(3, (1, 2), is_whole=True), "debug: timeline of round 3: 2 spans"),
    (Listening("0.0.0.0:50051"), "listening on 0.0.0.0:50051"),
    (Barred("tokens.json is damaged."), "error: no device can connect: tokens.json is damaged."),
    (Reloaded("tokens.json was read again: added pi-1."), "tokens.json was read again: added pi-1."),
    (ReloadFailed("b.pem has no certificate."), "warning: b.pem has no certificate."),
    (Expiring("The certificate in a.pem expires soon."), "warning: The certificate in a.pem expires soon."),
    (Refused("pi-9", "Another network."), "warning: pi-9 was refused: Another network."),
    (Refused("", "No HELLO.", again=True), "warning: an unknown device was refused: No HELLO; it may try again"),
    (ReportWritten("runs/mine/report.html"), "report written to runs/mine/report.html"),
    (ReportFailed("No report of runs/mine: no space left."), "warning: No report of runs/mine: no space left."),
    (Resumed(6), "resuming after round 6, from its checkpoint"),
    (Resumed(6, 1), "resuming after round 6, from its checkpoint; 1 later round is trained again"),
    (Resumed(6, 2), "resuming after round 6, from its checkpoint; 2 later rounds are trained again"),
    (Waiting(2, 5), "waiting for devices: 2 of 5 joined"),
    (Joined("pi-2", 3), "pi-2 joined (3 of 5 devices)"),
    (STARTED, "training starts: pipar, 3 rounds, results in runs/x"),
    (
        replace(STARTED, leakage="privacy.max_leakage = 0.5 rules out P=1 (leaks 0.90)."),
        "training starts: pipar, 3 rounds, results in runs/x; privacy.max_leakage = 0.5 rules out P=1 (leaks 0.90).",
    ),
    (Progress("pi-1", 7, 4, 100, 2.25, 1.0), "debug: pi-1: round 7, iteration 4, loss 2.250"),
    (Away("pi-2", 30.0), "warning: pi-2 lost its connection and has 30 s to reconnect"),
    (Back("pi-2", 4.24), "pi-2 reconnected after 4.2 s"),
    (Silent("pi-3", 1.72), "debug: pi-3 has sent nothing for 1.7 s, and the round waits for it"),
    (Heard("pi-3", 4.2), "debug: pi-3 responds again after 4.2 s"),
    (Lost("pi-3", "it did not come back"), "warning: pi-3 is lost: it did not come back"),
    (Dropped("pi-3", 7, "it was lost"), "warning: round 7 excludes pi-3: it was lost"),
    (
        RoundOver(6, {"pi-1": 1000}, {"pi-3": 40}),
        "round 6 finished: 1 device, 1,000 samples; the shared server-side model was also trained on 40 samples of "
        "pi-3",
    ),
    (
        Drawn(7, ("pi-1", "pi-2"), 5, {"pi-1": 3, "pi-2": 3}),
        "round 7: 2 of 5 devices drawn (pi-1, pi-2); the others are idle",
    ),
    (
        DevicesEvaluated(7, {"devices": {"pi-1": {}}, "mean": {"loss": 0.5}, "worst_decile": {"loss": 0.75}}),
        "1 device evaluated the final model, on devices: loss 0.5 (worst decile 0.75)",
    ),
    (
        RoundRestarted(7, 60.0),
        "warning: round 7 restarts with a deadline of 60 s: no device finished it, and the model is unchanged",
    ),
    (RoundOver(7, {"pi-1": 1000, "pi-2": 500}), "round 7 finished: 2 devices, 1,500 samples"),
    (
        RoundOver(8, {"pi-1": 1000, "pi-2": 500}, epsilon={"pi-1": 2.34567, "pi-2": 2.34567}),
        "round 8 finished: 2 devices, 1,500 samples, epsilon 2.346",
    ),
    (
        RoundOver(9, {"pi-1": 1000}, epsilon={f"pi-{number}": float(number) for number in range(1, 10)}),
        "round 9 finished: 1 device, 1,000 samples, epsilon 1 of pi-1, 2 of pi-2, 3 of pi-3, 4 of pi-4, 5 of pi-5, "
        "6 of pi-6, 7 of pi-7, 8 of pi-8 and 1 more",
    ),
    (
        BudgetSpent(9, "pi-9", 9.5678, 9.0),
        "warning: Training ended after epoch 9: one more would bring pi-9 to epsilon 9.568, and privacy.target_epsilon "
        "is 9.",
    ),
    (
        EPOCH,
        "result of round 7: 412.3 s, loss 1.234, validation loss 1.500, accuracy 62.5%, 2 devices, 12.0 MB up, "
        "3.4 KB down",
    ),
    (
        EquivalenceChanged(7, ("batch statistics", "dropout")),
        "after round 7, the weights are statistical: batch statistics, dropout",
    ),
    (EndedByCallback(7), "Training ended after epoch 7: a callback ended it."),
    (Saved(7, "runs/x/checkpoint"), "round 7 saved in runs/x/checkpoint"),
    (SaveFailed(7, "no space left on device"), "error: round 7 could not be saved: no space left on device"),
    (Replanned(8, PLANS), "new plans from round 8 on: pi-1 P=1 N=9 1f1b(4) planes/sparse"),
    (Replanned(8, PLANS, "pi-2 left"), "new plans from round 8 on (pi-2 left): pi-1 P=1 N=9 1f1b(4) planes/sparse"),
    (
        NotEvaluated("pi-1", 7, "ValueError: only one class"),
        "warning: pi-1 could not evaluate the model of round 7: ValueError: only one class",
    ),
    (
        TimedByPrograms("links change"),
        "the programs time this training, which takes longer than the simulator, because links change",
    ),
    (
        NotKept("a", "they take 2.0 GiB, and 1.0 GiB are allowed"),
        "warning: the activations of a are the same in every epoch, but are not kept: they take 2.0 GiB, and 1.0 GiB "
        "are allowed; for fewer bytes give a larger server.activation_cache, or TMPDIR on a larger disk",
    ),
    (ReplanFailed("New plans could not be chosen: no."), "warning: New plans could not be chosen: no."),
    (Connecting("server:50051"), "connecting to server:50051"),
    (Connected("server:50051"), "connected to server:50051"),
    (
        Reconnecting("server:50051", 1, 1.26, "connection refused"),
        "warning: no connection to server:50051 (connection refused); attempt 1 in 1.3 s",
    ),
    (
        Reconnecting("server:50051", 2, 0.5, "connection refused"),
        "still no connection to server:50051; attempt 2 in 0.5 s",
    ),
    (
        Reconnecting("server:50051", 1, 0.01, "connection refused"),
        "warning: no connection to server:50051 (connection refused); attempt 1 at once",
    ),
    (
        Reconnecting("server:50051", 3, 2.0, "too many connect"),
        "no connection to server:50051 (too many connect); attempt 3 in 2 s",
    ),
    (
        Reconnecting("server:50051", 1, 0.25, "The server stops for now.", is_on_purpose=True),
        "the server at server:50051 is stopping; attempt 1 in 0.25 s",
    ),
    (
        TrackerFailed("mlflow", "OSError: no space left"),
        "warning: tracker mlflow is off, training continues without it: OSError: no space left",
    ),
    (Left("pi-1"), "pi-1 left"),
    (Left("pi-1", "The server stops for now."), "pi-1 was dismissed: The server stops for now."),
    (Welcomed("pi-1", "P=1 N=9"), "pi-1 takes part with plan P=1 N=9"),
    (Trained("pi-1", 7, 1000), "pi-1 finished its part of round 7: 1,000 samples"),
    (
        Trained("pi-1", 7, 1000, 1.76543),
        "pi-1 finished its part of round 7: 1,000 samples, epsilon 1.765 spent",
    ),
    (
        Trained("pi-1", 8, 1000, 1.76543, 3.9999999),
        "pi-1 finished its part of round 8: 1,000 samples, epsilon 1.765 of 4 spent",
    ),
    (
        TimeoutsChosen(0.9, 0.9, 5.0, "rounds of 0.5 s"),
        "timeouts (rounds of 0.5 s): a device without a sign of life is lost after 0.9 s, a broken connection may be "
        "resumed for 0.9 s, a device that does not finish is excluded after 5 s",
    ),
    (
        TimeoutsChosen(None, None, 60.0, "rounds of 2 s forecast"),
        "timeouts (rounds of 2 s forecast): a device that does not finish is excluded after 60 s",
    ),
    (Stopping("SIGTERM"), "stopping: SIGTERM"),
    (Failed("Too few devices are left."), "error: failed: Too few devices are left."),
]


def _lines(*events: Event, log_format: LogFormat = "text", level: int = logging.DEBUG) -> list[str]:
    stream = io.StringIO()
    with logged(log_format, stream=stream, level=level) as observe:
        for event in events:
            observe(event)
    return stream.getvalue().splitlines()


def _objects(*events: Event) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in _lines(*events, log_format="json")]


def test_every_event_has_a_sentence_in_plain_english() -> None:
    assert {type(event) for event, _ in SAID} == set(get_args(Event))
    lines = _lines(*(event for event, _ in SAID))
    assert [line[10:] for line in lines] == [said for _, said in SAID]
    assert all(re.match(r"\d\d:\d\d:\d\d  \S", line) for line in lines)


def test_progress_is_not_logged_at_level_info() -> None:
    said = "\n".join(_lines(*(event for event, _ in SAID), level=logging.INFO))
    assert "iteration" not in said
    assert "412.3 s" in said


def test_the_start_of_a_long_step_is_logged_once() -> None:
    said = _lines(*(Preparing("Measuring the layers", share) for share in (0.0, 0.5, 1.0)), level=logging.INFO)
    assert [line[10:] for line in said] == ["Measuring the layers: this takes some seconds"]


def test_a_result_lists_only_known_values() -> None:
    bare = replace(EPOCH, train_loss=None, val_loss=None, val_accuracy=None)
    assert EventDescriber().sentence(bare) == "result of round 7: 412.3 s, 12.0 MB up, 3.4 KB down"


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ([], "pi-1 joined (1 device)"),
        ([Waiting(0, 1)], "pi-1 joined (1 of 1 device)"),
        ([Waiting(0, 5)], "pi-1 joined (1 of 5 devices)"),
        ([STARTED, Waiting(0, 2)], "pi-1 joined (1 of 2 devices)"),
    ],
)
def test_a_joining_device_is_counted_with_the_expected_number_if_it_is_known(before: list[Event], said: str) -> None:
    assert _lines(*before, Joined("pi-1", 1))[-1].endswith(f"  {said}")


def test_more_devices_than_expected_are_only_counted() -> None:
    assert _lines(Waiting(1, 2), Joined("pi-3", 3))[-1].endswith("pi-3 joined (3 devices)")


def test_a_peer_cannot_forge_a_line_or_move_the_cursor() -> None:
    evil = "no\n12:00:00  pi-9 joined\r\x1b[2J\u2028\x00"
    (line,) = _lines(Lost("pi-1", evil))
    assert line.isprintable()
    assert line.endswith(r"pi-1 is lost: no\n12:00:00  pi-9 joined\r\x1b[2J\u2028\x00")
    (content,) = _objects(Lost("pi-1", evil))
    assert content["reason"] == evil


def test_json_has_time_level_event_message_and_fields() -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    (content,) = _objects(Away("pi-2", 30.0))
    at = datetime.fromisoformat(content.pop("time"))
    assert before <= at <= datetime.now(UTC)
    assert at.utcoffset() == UTC.utcoffset(None)
    assert content == {
        "level": "warning",
        "event": "Away",
        "message": "pi-2 lost its connection and has 30 s to reconnect",
        "device": "pi-2",
        "seconds_allowed": 30.0,
    }


def test_every_event_is_one_object_with_all_of_its_fields() -> None:
    events = [event for event, _ in SAID]
    contents = _objects(*events)
    for event, content in zip(events, contents, strict=True):
        names = {field.name for field in fields(event)}
        assert content["event"] == type(event).__name__
        assert set(content) == {"time", "level", "event", "message"} | names
        # No field hides one that every line has.
        assert not names & {"time", "level", "event", "message", "logger", "exception"}


def test_a_training_that_diverged_is_still_json() -> None:
    (content,) = _objects(replace(EPOCH, train_loss=float("nan"), val_loss=float("inf")))
    assert (content["train_loss"], content["val_loss"]) == (None, None)
    assert "loss nan, validation loss inf" in content["message"]


def test_warnings_of_other_libraries_have_the_same_format() -> None:
    stream = io.StringIO()
    with logged("json", stream=stream):
        logging.getLogger("other").warning("beware of %s", "dogs")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(True)
            warnings.warn("old", UserWarning, stacklevel=1)
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("other").exception("it happens")
    first, second, third = map(json.loads, stream.getvalue().splitlines())
    assert (first["logger"], first["message"]) == ("other", "beware of dogs")
    assert second["logger"] == "py.warnings"
    assert third["exception"].endswith("ValueError: broken")


def test_logging_is_restored_afterwards() -> None:
    root, log = logging.getLogger(), logging.getLogger("pipar")
    before = (list(root.handlers), log.level)
    with logged(stream=io.StringIO(), level=logging.DEBUG):
        assert (list(root.handlers), log.level) != before
    assert (list(root.handlers), log.level) == before


def test_a_program_that_embeds_pipar_gets_the_events_through_logging(log_records: list[logging.LogRecord]) -> None:
    log_observer()(Left("pi-1"))
    (record,) = log_records
    assert (record.name, record.getMessage(), record.__dict__["event"]) == ("pipar", "pi-1 left", Left("pi-1"))


def test_a_closed_stream_does_not_end_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    stream.close()
    with logged(stream=stream) as observe:
        observe(Left("pi-1"))
    assert "ValueError" in capsys.readouterr().err  # logging reports it and continues


def test_all_observers_get_every_event_in_order() -> None:
    heard: list[tuple[str, Event]] = []
    observe = tell_all(lambda event: heard.append(("a", event)), lambda event: heard.append(("b", event)))
    observe(Left("pi-1"))
    assert heard == [("a", Left("pi-1")), ("b", Left("pi-1"))]
