"""Micro-batches that are computed at the same time are answered in their order, and a failure is not lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipar.errors import ProtocolError
from pipar.server.at_once import SeveralAtOnce, Turn


class SessionThatFails:
    """Keeps the errors that readers of a session's messages would get."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []

    def fail(self, error: Exception) -> None:
        self.failures.append(error)


def several(most: int) -> tuple[SeveralAtOnce, SessionThatFails]:
    session: Any = SessionThatFails()
    return SeveralAtOnce(session, most), session


def test_an_answer_waits_for_the_one_before_and_all_that_belongs_to_it() -> None:
    sent: list[str] = []
    first = Turn()
    second = Turn(first)
    third = Turn(second)
    third.send(lambda: sent.append("3"))
    third.end()
    second.send(lambda: sent.append("2a"))
    assert sent == []
    first.send(lambda: sent.append("1a"))
    second.send(lambda: sent.append("2b"))
    first.send(lambda: sent.append("1b"))
    assert sent == ["1a", "1b"]
    first.end()
    assert sent == ["1a", "1b", "2a", "2b"]
    second.send(lambda: sent.append("2c"))
    second.end()
    assert sent == ["1a", "1b", "2a", "2b", "2c", "3"]
    Turn(third).send(lambda: sent.append("4"))
    assert sent[-1] == "4"


def test_at_most_so_many_run_at_the_same_time_and_the_next_begins_when_one_ends() -> None:
    async def most_running() -> tuple[int, list[int]]:
        work, _ = several(2)
        running, most, begun = 0, 0, list[int]()
        ends = [asyncio.Event() for _ in range(4)]

        async def compute(number: int) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            begun.append(number)
            await ends[number].wait()
            running -= 1

        async def begin_all() -> None:
            for number in range(4):
                await work.begin(lambda _, number=number: compute(number))
            await work.finish()

        beginning = asyncio.create_task(begin_all())
        for number in (1, 0, 3, 2):  # the second one ends first
            for _ in range(5):
                await asyncio.sleep(0)
            ends[number].set()
        await beginning
        return most, begun

    assert asyncio.run(most_running()) == (2, [0, 1, 2, 3])


def test_a_failure_is_raised_to_the_reader_of_messages_and_where_the_next_one_begins() -> None:
    async def failed() -> list[Exception]:
        work, session = several(2)

        async def fail(_: Turn) -> None:
            raise ProtocolError("too many")

        await work.begin(fail)
        for _ in range(3):
            await asyncio.sleep(0)
        for again in (work.begin(fail), work.finish()):
            with pytest.raises(ProtocolError, match="too many"):
                await again
        return session.failures

    assert [str(error) for error in asyncio.run(failed())] == ["too many"]


def test_work_that_is_stopped_is_no_failure() -> None:
    async def stopped() -> list[Exception]:
        work, session = several(2)

        async def wait(_: Turn) -> None:
            await asyncio.Event().wait()

        await work.begin(wait)
        work.stop()
        await work.finish()
        return session.failures

    assert asyncio.run(stopped()) == []
