"""Messages to browsers: the latest only, as server-sent events."""

from __future__ import annotations

import asyncio
import json
from itertools import count

from pipar.execution.clock import run_virtually
from pipar.live_page.feed import Feed, Stream, message


async def taken(stream: Stream, number: int) -> list[bytes]:
    """Return the next messages."""
    messages = stream.messages()
    return [await anext(messages) for _ in range(number)]


def test_a_message_is_one_event_of_one_line_with_any_content() -> None:
    said = message("state", {"name": "a\nb\r\nevent: evil", "n": 1})
    assert said.endswith(b"\n\n")
    first, second = said.decode().removesuffix("\n\n").split("\n")
    assert first == "event: state"
    assert json.loads(second.removeprefix("data: ")) == {"name": "a\nb\r\nevent: evil", "n": 1}


def test_a_new_stream_gets_the_latest_of_each_kind() -> None:
    feed = Feed(4, {"state": lambda: 1, "content": lambda: None})
    stream = feed.open()
    assert stream is not None
    retry, state, content = asyncio.run(taken(stream, 3))
    assert retry.startswith(b"retry: ")
    assert (state, content) == (b"event: state\ndata: 1\n\n", b"event: content\ndata: null\n\n")


def test_a_slow_stream_gets_only_the_latest() -> None:
    numbers = count()
    feed = Feed(4, {"state": lambda: next(numbers)})
    stream = feed.open()
    assert stream is not None
    for _ in range(1000):
        feed.renew("state")
    assert asyncio.run(taken(stream, 2))[1] == b"event: state\ndata: 1000\n\n"


def test_no_message_is_made_without_a_stream() -> None:
    made: list[int] = []
    feed = Feed(4, {"state": lambda: made.append(1)})
    feed.renew("state")
    assert made == []
    for _ in range(3):
        feed.open()
    assert made == [1]
    feed.renew("state")
    assert made == [1, 1]


def test_a_later_stream_gets_a_message_with_its_own_time() -> None:
    times, reports = count(), count()
    feed = Feed(4, {"state": lambda: next(times), "content": lambda: next(reports)}, dated=("state",))
    streams = [stream for _ in range(3) if (stream := feed.open())]
    taken_by_last = asyncio.run(taken(streams[-1], 3))[1:]
    assert taken_by_last == [b"event: state\ndata: 2\n\n", b"event: content\ndata: 0\n\n"]


def test_the_number_of_streams_is_limited_until_one_is_closed() -> None:
    feed = Feed(2, {})
    first, second = feed.open(), feed.open()
    assert first is not None
    assert second is not None
    assert feed.open() is None
    feed.close(first)
    assert feed.open() is not None


def test_a_silent_stream_gets_keep_alives() -> None:
    assert run_virtually(taken(Stream(), 3))[1:] == [b"event: alive\ndata: null\n\n"] * 2


def test_an_ended_stream_sends_its_last_messages_and_ends() -> None:
    async def all_of(stream: Stream) -> list[bytes]:
        return [said async for said in stream.messages()]

    feed = Feed(2, {"state": lambda: "last"})
    stream = feed.open()
    assert stream is not None
    feed.end()
    assert asyncio.run(all_of(stream))[1:] == [b'event: state\ndata: "last"\n\n']
