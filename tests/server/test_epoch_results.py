"""An epoch's result is emitted when it is complete, in order, with numbers computed by hand."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipar.errors import TrainingError
from pipar.events import EpochResult, Scores
from pipar.execution.clock import run_virtually
from pipar.execution.spans import EpochTrace, Recorder, Span, Totals
from pipar.job.job import Bounds
from pipar.server.epoch_results import ResultCollector, RoundSummary, TimeBounds, possible_rates
from pipar.settings.links import Link

LINKS = {"a": Link(up_bps=800.0, down_bps=1600.0), "b": Link(up_bps=None, down_bps=None)}


class Book:
    """A collector for two devices on two cores, and the results it has emitted."""

    def __init__(self, bounds: Bounds | None = None, links: Mapping[str, Link] = LINKS) -> None:
        self.results: list[EpochResult] = []
        self.spans: list[list[Span]] = []
        self.recorder, self.background = Recorder("server"), Recorder("server")
        self.reported: defaultdict[int, set[str]] = defaultdict(set)  # whose traces have arrived
        time_bounds = TimeBounds(links, bounds or Bounds({"a": 1.0, "b": 2.0}, 3.0), 2)
        self.collector = ResultCollector(time_bounds, self.recorder, self.background, self.emit)

    def emit(self, result: EpochResult, spans: list[Span]) -> None:
        self.results.append(result)
        self.spans.append(spans)

    def add_device(self, name: str, epoch: int, *, bytes_up: int = 0, bytes_down: int = 0) -> None:
        """Device a: 10..18 s with 4 s of compute, 2 s of uplink, 1 s of downlink; b: 11..20 s with 6 s, 0 s, 3 s."""
        times = {"a": (10.0, 18.0, 4.0, 2.0, 1.0), "b": (11.0, 20.0, 6.0, 0.0, 3.0)}
        start, end, busy, uplink, downlink = times[name]
        totals = {"io": Totals(0.5, 0.0, start, end - 3), "compute": Totals(busy, 1.0, start + 0.5, end)}
        if uplink:
            totals["uplink"] = Totals(uplink, 0.0, 12.0, 14.0)
        down = EpochTrace(name, epoch, {"downlink": Totals(downlink, 0.0, 14.0, 15.0)})
        span = Span(name, "compute", "fc", epoch, 1, 1, start, end)
        self.reported[epoch].add(name)
        self.collector.add_trace(EpochTrace(name, epoch, totals, [span]), down, bytes_up, bytes_down)

    def add_round(self, epoch: int) -> None:
        self.recorder.busy("core 0", "fs", epoch, 1, 1, 12.0, 15.0, "a")
        self.recorder.busy("core 1", "fs", epoch, 1, 1, 12.0, 14.0, "b")
        summary = RoundSummary({"a": 30, "b": 20}, 1.25, seconds=9.0)
        self.collector.add_round(epoch, summary, reporting={"a", "b"} - self.reported[epoch])

    def add_validation(self, epoch: int, loss: float | None = 0.5) -> None:
        self.background.busy("validation", "validate", epoch, 0, 0, 20.0, 20.75)
        self.collector.add_validation(epoch, Scores(loss, 0.9))

    def add_all(self, epoch: int) -> None:
        self.add_device("a", epoch)
        self.add_device("b", epoch)
        self.add_round(epoch)
        self.add_validation(epoch)


def test_a_link_that_changes_counts_with_the_time_its_bytes_were_on_it() -> None:
    async def main() -> Book:
        fast_first = Link.changing([Link(up_bps=8e9), Link(up_bps=800.0)], 60.0)
        book = Book(Bounds({"a": 1.0, "b": 1.0}, 1.0), {"a": fast_first, "b": Link(up_bps=8e9, down_bps=8e9)})
        book.add_all(1)
        return book

    assert run_virtually(main()).results[0].bound_s == 2.0  # of a's uplink


def test_an_epochs_numbers_are_those_worked_out_by_hand() -> None:
    async def main() -> Book:
        book = Book()
        book.add_device("a", 1, bytes_up=450, bytes_down=200)
        book.add_device("b", 1, bytes_up=1000, bytes_down=2000)
        book.add_round(1)
        book.add_validation(1)
        return book

    book = run_virtually(main())
    # From the first load (a, 10) to the last device's installed model (b, 20). Of the link only a's has a rate:
    # 450 x 8 / 800 = 4.5 s up and 1 s down, more than any device's 2 s and the server's 3 / 2 s.
    assert book.results == [
        EpochResult(
            epoch=1,
            seconds=10.0,
            samples=50,
            train_loss=1.25,
            val_loss=0.5,
            val_accuracy=0.9,
            bytes_up=1450,
            bytes_down=2200,
            server_idle_s=10.0 - (3.0 + 2.0) / 2,
            device_idle_s=10.0 - (4.0 + 6.0) / 2,
            bound_s=4.5,
            efficiency=0.45,
            validation_s=0.75,
            utilisation={"device": 0.5, "uplink": 0.1, "server": 0.25, "downlink": 0.2},
            devices=2,
            device_bytes={"a": [450, 200], "b": [1000, 2000]},
        )
    ]
    assert sorted((span.owner, span.kind) for span in book.spans[0]) == [
        ("a", "fc"),
        ("b", "fc"),
        ("server", "fs"),
        ("server", "fs"),
        ("server", "validate"),
    ]


@pytest.mark.parametrize(
    ("bounds", "bytes_up", "bytes_down", "bound"),
    [
        # b's link has no configured rate: its 3 s on the downlink follow from the measured rate.
        (Bounds({"a": 1.0, "b": 2.0}, 3.0), 0, 0, 3.0),
        (Bounds({"a": 1.0, "b": 4.0}, 3.0), 0, 0, 4.0),
        (Bounds({"a": 1.0, "b": 2.0}, 9.0), 0, 0, 4.5),
        (Bounds({"a": 1.0, "b": 2.0}, 3.0), 350, 0, 3.5),
        (Bounds({"a": 1.0, "b": 2.0}, 3.0), 300, 1000, 5.0),
    ],
    ids=["measured rate", "device", "server over its cores", "uplink", "downlink"],
)
def test_the_bound_is_the_busiest_lane(bounds: Bounds, bytes_up: int, bytes_down: int, bound: float) -> None:
    async def main() -> float:
        book = Book(bounds)
        book.add_device("a", 1, bytes_up=bytes_up, bytes_down=bytes_down)
        book.add_device("b", 1, bytes_up=10**9, bytes_down=10**9)
        book.add_round(1)
        book.add_validation(1)
        return book.results[0].bound_s

    assert run_virtually(main()) == bound


Part = Callable[[Book], None]
PARTS: list[tuple[str, Part]] = [
    (f"{what} {epoch}", part)
    for epoch in (1, 2)
    for what, part in (
        ("a", lambda book, epoch=epoch: book.add_device("a", epoch)),
        ("b", lambda book, epoch=epoch: book.add_device("b", epoch)),
        ("round", lambda book, epoch=epoch: book.add_round(epoch)),
        ("validation", lambda book, epoch=epoch: book.add_validation(epoch)),
    )
]


@pytest.mark.slow
@given(st.permutations(PARTS))
def test_an_epoch_is_emitted_when_it_is_complete_and_never_before_the_previous_one(
    parts: list[tuple[str, Part]],
) -> None:
    async def main() -> None:
        book, given_ = Book(), set()
        for name, part in parts:
            part(book)
            given_.add(name)
            whole = [all(f"{what} {epoch}" in given_ for what in ("a", "b", "round", "validation")) for epoch in (1, 2)]
            expected = [1, 2] if all(whole) else [1] if whole[0] else []
            assert [result.epoch for result in book.results] == expected

    run_virtually(main())


def test_waiting_for_completion_ends_with_the_last_epoch() -> None:
    async def main() -> float:
        book = Book()
        waiting = asyncio.create_task(book.collector.complete(2))
        for epoch in (1, 2):
            await asyncio.sleep(1.0)
            assert not waiting.done()
            book.add_all(epoch)
        await waiting
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == 2.0


@pytest.mark.parametrize(
    ("losses", "stale"),
    [
        ([1.0], 0),
        ([1.0, 0.5, 0.25], 0),
        ([1.0, 2.0, 3.0], 2),
        ([1.0, 0.5, 0.6, 0.7, 0.5], 3),
        ([None, None], 0),
        ([], 0),
    ],
    ids=str,
)
def test_stale_epochs_count_from_the_best_loss(losses: list[float | None], stale: int) -> None:
    async def main() -> int:
        book = Book()
        for epoch, loss in enumerate(losses, start=1):
            book.add_validation(epoch, loss)
        book.add_validation(len(losses) + 1, 0.0)  # a later one that is not asked for
        return await book.collector.stale_epochs(len(losses))

    assert run_virtually(main()) == stale


def test_staleness_waits_for_the_validation_that_it_needs() -> None:
    async def main() -> tuple[int, float]:
        book = Book()
        waiting = asyncio.create_task(book.collector.stale_epochs(2))
        for epoch in (1, 2):
            await asyncio.sleep(1.0)
            book.add_validation(epoch, 1.0)
        return await waiting, asyncio.get_running_loop().time()

    assert run_virtually(main()) == (1, 2.0)


def test_a_failure_reaches_all_waiters_and_those_that_wait_later() -> None:
    async def main() -> None:
        book = Book()
        failure = TrainingError("pi was lost")
        waiting = [asyncio.create_task(book.collector.complete(1)), asyncio.create_task(book.collector.stale_epochs(1))]
        await asyncio.sleep(1.0)
        book.collector.fail(failure)
        assert await asyncio.gather(*waiting, return_exceptions=True) == [failure, failure]
        with pytest.raises(TrainingError, match="pi was lost"):
            await book.collector.complete(1)

    run_virtually(main())


def test_a_loss_that_has_diverged_is_worse_than_any_other() -> None:
    async def main() -> list[int]:
        book = Book()
        for epoch, loss in enumerate((float("nan"), 2.0, 1.0, float("inf")), start=1):
            book.add_all(epoch)
            book.collector._losses[-1] = loss
        return [await book.collector.stale_epochs(epoch) for epoch in (1, 2, 3, 4)]

    assert run_virtually(main()) == [0, 0, 0, 1]


def test_no_rate_is_lower_than_what_the_bytes_of_the_round_needed() -> None:
    assert possible_rates([9.0e6, 49999999.99999931], [766_000, 766_000], 0.37) == [16562200.0, 50e6]
    assert possible_rates([None, 5e6], [766_000, 766_000], 0.37) == [None, 16562200.0]
    assert possible_rates([9.0e6, None], [], 0.37) == [9.0e6, None]  # its trace never came
