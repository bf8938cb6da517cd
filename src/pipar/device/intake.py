"""What a device takes from its server: orders that it has agreed to, and messages of the sizes that they need.

A device trusts its server with the training, but not with its memory: a server may be faulty, or taken over.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from pipar.errors import OrdersError
from pipar.profiling.memory import training_bytes
from pipar.profiling.profile import Profile
from pipar.transport.channel import Channel
from pipar.transport.limits import MESSAGE_BYTES
from pipar.units import format_bytes
from pipar.wire.frames import MAX_BODY_BYTES, SMALL_BODY_BYTES
from pipar.wire.messages import Kind, Message
from pipar.wire.orders import Orders

#: Of N micro-batches, as many as a slow uplink may still hold of abandoned rounds.
_MOST_UNACKNOWLEDGED_BATCHES = 10
#: END_EPOCH, MODEL, TRACE and ABANDON of as many rounds as a device may be late.
_MOST_UNACKNOWLEDGED = 100
#: Unread commands: two models, because a device that is late has the next one before it has installed the last one.
_UNREAD_MODELS, _UNREAD_SMALL_BYTES = 2, 4 * SMALL_BODY_BYTES


@dataclass(frozen=True)
class Terms:
    """What a device agrees to, independently of its server's orders: its own network, and what fits into its memory."""

    part_bytes: tuple[int, ...]  # of the first layer of its network, of the first two, and so on
    profile: Profile | None = None  # of as many layers as fit
    memory_bytes: int | None = None  # of the device's process; None: no limit
    samples: int | None = None  # that it has; None: any number

    def check(self, orders: Orders) -> None:
        """Raise if the device has not agreed to these orders."""
        layers = len(self.part_bytes)
        if orders.layers != layers:
            raise OrdersError(
                f"The server trains a network of {orders.layers} layers, but this device's network of {layers} layers "
                "is another one: start both with the same [model] and the same run.method."
            )
        if self.profile is not None and self.memory_bytes is not None:
            self._check_memory(orders, self.profile, self.memory_bytes)

    def _check_memory(self, orders: Orders, profile: Profile, memory_bytes: int) -> None:
        plan, known = orders.plan, len(profile.layers)
        if plan.split_point > known:
            raise OrdersError(
                f"The server orders {plan}, but only the first {known} of its layers fit into this device's memory of "
                f"{format_bytes(memory_bytes)}: give the server the device's memory, or a smaller split point."
            )
        batch_size = max(1, orders.batch_size if self.samples is None else min(orders.batch_size, self.samples))
        keeps = {"batch_statistics": orders.batch_statistics, "keeps_base": orders.keeps_base}
        needed = training_bytes(profile, plan, batch_size, **keeps)
        if needed > memory_bytes:
            raise OrdersError(
                f"The server orders {plan} with batches of {batch_size} samples, which take about "
                f"{format_bytes(needed)}, but this device has {format_bytes(memory_bytes)}: give the server the "
                "device's memory, or a smaller batch size."
            )


class Commands(asyncio.Queue[Message]):
    """The server's commands that the device has not followed yet."""

    def __init__(self) -> None:
        super().__init__()
        self._size_bytes = 0
        self._taken = asyncio.Event()

    def _put(self, item: Message) -> None:
        super()._put(item)
        self._size_bytes += item.body.size_bytes + MESSAGE_BYTES

    def _get(self) -> Message:
        item: Message = super()._get()
        self._size_bytes -= item.body.size_bytes + MESSAGE_BYTES
        self._taken.set()
        return item

    async def have_room(self, room_bytes: int) -> None:
        """Return when the commands take no more than this; until then nothing more is read from the server."""
        while self._size_bytes > room_bytes:
            self._taken.clear()
            await self._taken.wait()


class Intake:
    """Limits what arrives over a device's channel: small messages at first, then what its orders need."""

    def __init__(self, channel: Channel, terms: Terms | None, *, evaluates: bool = True) -> None:
        self._channel = channel
        self._terms = terms
        self._evaluates = evaluates  # it has offered to evaluate whole models
        self._orders: Orders | None = None  # with the last plan that has arrived, followed or not
        self._model_bytes = self._state_bytes = self._gradient_bytes = self._network_bytes = SMALL_BODY_BYTES
        channel.limit(self._most_bytes)

    def _most_bytes(self, message: Message) -> int:
        match message.kind:
            case Kind.MODEL:
                return self._model_bytes
            case Kind.STATE:
                return self._state_bytes
            case Kind.EVALUATE:
                return self._network_bytes
            case Kind.GRADIENT:
                return self._gradient_bytes
        return SMALL_BODY_BYTES

    @property
    def room_bytes(self) -> int:
        """How much unread commands may take."""
        return _UNREAD_MODELS * self._model_bytes + _UNREAD_SMALL_BYTES

    def follow(self, orders: Orders) -> None:
        """Take what these orders need from now on; raise if the device has not agreed to them."""
        part_bytes = self._network_bytes = MAX_BODY_BYTES
        if self._terms is not None:
            self._terms.check(orders)
            part_bytes = self._terms.part_bytes[orders.plan.split_point - 1] + SMALL_BODY_BYTES
            self._network_bytes = self._terms.part_bytes[-1] + SMALL_BODY_BYTES
        if not self._evaluates:
            self._network_bytes = SMALL_BODY_BYTES
        self._orders, self._model_bytes = orders, part_bytes
        self._state_bytes = part_bytes * self._state_copies if orders.keep_state else SMALL_BODY_BYTES
        kept = _MOST_UNACKNOWLEDGED_BATCHES * orders.plan.micro_batches + _MOST_UNACKNOWLEDGED
        self._channel.most_unacknowledged = max(kept, self._channel.most_unacknowledged or 0)

    @property
    def _state_copies(self) -> int:
        """At most how many values an optimiser keeps for each weight."""
        known = None if self._terms is None else self._terms.profile
        return 1 if known is None else max(1, math.ceil(known.state_copies))

    def note(self, message: Message) -> None:
        """Take what this message of the server announces, or this one of the device asks for."""
        if message.kind is Kind.PLAN and self._orders is not None:  # its model may arrive before it is followed
            self.follow(self._orders.changed_by(message))
        elif message.kind is Kind.ACTIVATION:
            self._gradient_bytes = max(self._gradient_bytes, message.body.size_bytes)
