"""The device-side model counts the bytes of the work on it: frozen parameters are only in a whole model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pipar.device.model import DeviceSideModel
from pipar.execution.work import Work
from pipar.methods import Plan
from pipar.wire.messages import Body, Kind, Message
from pipar.wire.orders import Orders

ORDERS = Orders(1, Plan(1, 5), 2, 10, batch_statistics=False, keep_state=False)
FROZEN, CHANGING = 1000, 50
WHOLE = FROZEN + CHANGING


class Part:
    frozen_bytes = FROZEN

    def unpack_and_install(self, body: Body, *, keep_state: bool) -> None:
        pass

    def pack(self, *, changes: bool) -> Body:  # noqa: ARG002
        return Body(CHANGING)


class Lane:
    """Runs everything at once, and remembers it."""

    def __init__(self) -> None:
        self.done: list[Work] = []

    async def run(self, job: tuple[Work, Callable[[], Any]]) -> Any:
        self.done.append(job[0])
        return job[1]()


class Link:
    def rate_bps(self, epoch: int) -> None:  # noqa: ARG002
        return None


@pytest.mark.parametrize("sizes", [(WHOLE,), (WHOLE, CHANGING), (WHOLE, WHOLE), (WHOLE, CHANGING, WHOLE)], ids=str)
def test_the_returned_part_has_no_frozen_parameters_however_often_they_came(sizes: tuple[int, ...]) -> None:
    lane: Any = Lane()
    part: Any = Part()
    link: Any = Link()
    guard: Any = None
    model = DeviceSideModel(ORDERS, lambda _: part, lane, link, guard)

    async def follow() -> None:
        for epoch, size in enumerate(sizes):
            await model.install(Message(Kind.MODEL, epoch, body=Body(size, encoding="safetensors")))
        await model.pack(len(sizes))

    asyncio.run(follow())
    assert [work.size_bytes for work in lane.done] == [*sizes, CHANGING]
