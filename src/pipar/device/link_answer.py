"""A device's part in measuring its link: it tells when frames of the server came, and sends as many as wanted."""

from __future__ import annotations

import asyncio

from pipar.errors import ProtocolError
from pipar.transport.channel import Channel
from pipar.transport.link_trial import FRAME_BYTES, LONGEST_TRAIN
from pipar.wire.messages import Body, Kind, Message, json_body

#: More than any measurement needs.
_MOST_FRAMES = 8 * LONGEST_TRAIN


class LinkAnswer:
    """Answers PROBE messages, as many as a measurement needs."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._came: list[float] = []
        self._left = _MOST_FRAMES

    def take(self, message: Message) -> None:
        """Note a frame of the server; after the last one of a train, answer it."""
        self._left -= 1 + message.batch_samples if message.micro_batch == message.samples else 1
        if self._left < 0 or message.batch_samples > LONGEST_TRAIN:
            raise ProtocolError(f"The server asked for more than {_MOST_FRAMES} frames to measure the link.")
        self._came.append(asyncio.get_running_loop().time())
        if message.micro_batch < message.samples:
            return
        came, self._came = self._came, []
        self._channel.post(Message(Kind.PROBE, body=json_body({"came": [round(at, 6) for at in came]})))
        for _ in range(message.batch_samples):
            self._channel.post(Message(Kind.PROBE, body=Body.of(bytes(FRAME_BYTES))))
