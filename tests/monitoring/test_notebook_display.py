"""A notebook during a run: one output that is updated, from before the training to its last line."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pipar.events import EndedByCallback, EpochResult, Event, Preparing, Progress, Started, Starting
from pipar.monitoring.notebook_display import NotebookDisplay

STARTED = Started("runs/<b>", "pipar", 4, 2, {"a": "P=2 N=3"}, {"a": 40}, {"a": 4})
EPOCH = EpochResult(1, 2.0, 40, 1.5, 1.4, 0.5, 100, 200, 1.0, 1.0, 1.0, 0.5, 0.0)


@dataclass
class Shell:
    """A kernel's shell, as far as a display needs it."""

    now: float = 0.0
    published: list[dict[str, Any]] = field(default_factory=list)

    @property
    def display_pub(self) -> Any:
        return SimpleNamespace(publish=lambda **message: self.published.append(message))

    @property
    def texts(self) -> list[str]:
        return [message["data"]["text/plain"] for message in self.published]

    def show(self, *events: Event, every_s: float = 1.0) -> None:
        with NotebookDisplay(self, lambda: self.now) as display:
            for event in events:
                self.now += every_s
                display.observe(event)


def test_one_output_shows_the_run_from_the_start_to_its_end() -> None:
    shell = Shell()
    progress = Progress("a", 1, 2, 20, 1.75, 1.0)
    shell.show(Starting("run", "vgg5 on digits"), Preparing("Planning", 0.5), STARTED, progress, EPOCH)
    assert shell.texts[0] == "Preparing"
    assert "vgg5 on digits" in shell.texts[1]
    assert shell.texts[2:] == [
        "Planning",
        "pipar: epoch 1 of 4, iteration 0 of 0".replace("of 0", "of ?"),
        "pipar: epoch 1 of 4, iteration 2 of 4, loss 1.750",
        "pipar: epoch 1 of 4, iteration 2 of 4, loss 1.750, val acc. 50.0 %",
        "<b>: 1 of 4 epochs in 2.0 s",
    ]
    assert [message["update"] for message in shell.published] == [False, *[True] * 6]
    assert len({message["transient"]["display_id"] for message in shell.published}) == 1


def test_names_are_escaped_and_the_bar_disappears_at_the_end() -> None:
    shell = Shell()
    shell.show(STARTED)
    first, *_, last = (message["data"]["text/html"] for message in shell.published)
    assert "<progress" in first
    assert "<progress" not in last
    assert "&lt;b&gt;: 0 of 4 epochs" in last


def test_frequent_events_are_shown_a_few_times_a_second() -> None:
    shell = Shell()
    reports = [Progress("a", 1, step, 20, 1.0, float(step)) for step in range(1, 101)]
    shell.show(STARTED, *reports, every_s=0.01)
    assert 4 < len(shell.published) < 8


def test_a_comparison_keeps_a_line_of_each_run_and_notices() -> None:
    shell = Shell()
    shell.show(STARTED, EPOCH, EndedByCallback(1), Preparing("Planning", 0.5), STARTED, EPOCH)
    assert shell.texts[-1].splitlines() == [
        "Training ended after epoch 1: a callback ended it.",
        "<b>: 1 of 4 epochs in 3.0 s",
        "<b>: 1 of 4 epochs in 1.0 s",
    ]
    assert shell.texts[4].splitlines()[-1] == "Planning"
