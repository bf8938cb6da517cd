"""The device-side model M^c_k and its orders, both of which may change between rounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pipar.device.interfaces import DevicePart
from pipar.errors import ProtocolError
from pipar.execution.lanes import Lanes
from pipar.execution.work import Work
from pipar.privacy.budget import PrivacyGuard
from pipar.transport.channel import Channel
from pipar.wire.messages import EMPTY, Body, Kind, Message
from pipar.wire.orders import Orders

if TYPE_CHECKING:  # it imports numpy
    from pipar.privacy.mechanisms import NoiseSource


class DeviceSideModel:
    """Layers 1..P: built, installed, protected and packed on the compute lane."""

    def __init__(
        self,
        orders: Orders,
        build_part: Callable[[Orders], DevicePart],
        compute: Lanes,
        channel: Channel,
        guard: PrivacyGuard,
    ) -> None:
        self.orders = orders
        self.part = build_part(orders)
        self._build_part = build_part
        self._compute = compute
        self._channel = channel
        self._guard = guard
        self._size_bytes: int | None = None  # of what is exchanged after a round; None before the first model
        self._expects_state = False

    @property
    def is_installed(self) -> bool:
        """Whether the server has sent a model for the current plan."""
        return self._size_bytes is not None

    async def install(self, message: Message) -> None:
        """Install the model that the server has sent, whole or as changes of the one before."""
        body, keep = message.body, self.orders.keep_state
        form = "changes" if body.encoding == "changes" else "raw"
        size_bytes = body.size_bytes
        if form == "raw":
            # The first model has the frozen parameters; most others do not, which their size shows.
            frozen = self.part.frozen_bytes
            is_whole = self._size_bytes is None or size_bytes >= self._size_bytes + frozen
            self._size_bytes = size_bytes - (frozen if is_whole else 0)
        elif self._size_bytes is None:
            raise ProtocolError(f"The server sent {message} as changes of a model that it has not sent.")
        else:
            size_bytes = self._size_bytes
        install = Work("install", message.epoch, size_bytes=size_bytes, encoding=form)
        await self._compute.run((install, partial(self.part.unpack_and_install, body, keep_state=keep)))

    async def adopt(self, message: Message) -> None:
        """Continue with another plan; layers that leave this device take their optimiser state along if it is kept."""
        before, self.orders = self.orders, self.orders.changed_by(message)
        plan = self.orders.plan
        self._guard.accept_cut(plan.split_point, self.orders.layers)
        if plan.split_point == before.plan.split_point:
            return
        build = Work("install", message.epoch)
        part, leaving = await self._compute.run((build, partial(self._rebuild, self.orders)))
        self.part, self._size_bytes = part, None  # the model for it follows the plan
        if self.orders.keep_state:
            self._channel.post(Message(Kind.STATE, message.epoch, body=leaving))
            self._expects_state = True

    def _rebuild(self, orders: Orders) -> tuple[DevicePart, Body]:
        part = self._build_part(orders)
        return part, part.carry_state_from(self.part) if orders.keep_state else EMPTY

    async def receive_state(self, message: Message) -> None:
        """Install the optimiser state of layers that came from the server; their weights come with the model."""
        if not self._expects_state:
            raise ProtocolError(f"The server sent {message}, but no layers have moved.")
        self._expects_state = False
        install = Work("install", message.epoch, size_bytes=message.body.size_bytes)
        await self._compute.run((install, partial(self.part.receive_state, message.body)))

    async def discard(self, epoch: int) -> None:
        """Discard unfinished work of an epoch, after work on the same part that could not be stopped."""
        await self._compute.run((Work("install", epoch), self.part.discard))

    async def protect(self, epoch: int, noise: NoiseSource) -> None:
        """Clip this round's update and add noise to it; nothing else is done to it afterwards."""
        assert self._size_bytes is not None
        protect = Work("protect", epoch, size_bytes=self._size_bytes)
        how = {"clip": self.orders.clip, "multiplier": self.orders.noise_multiplier}
        await self._compute.run((protect, partial(self.part.protect, noise, **how)))

    async def pack(self, epoch: int) -> Body:
        """Return the trained part, as changes where the link is slow."""
        assert self._size_bytes is not None
        changes = self.orders.sends_changes(self._channel.rate_bps(epoch))
        pack = Work("pack", epoch, size_bytes=self._size_bytes, encoding="changes" if changes else "raw")
        body: Body = await self._compute.run((pack, partial(self.part.pack, changes=changes)))
        return body
