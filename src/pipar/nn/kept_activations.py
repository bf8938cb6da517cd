"""Activations that devices with frozen layers have sent, kept so that they need not be computed and sent again.

A device's activations of one epoch are numbered in the order of their arrival, and later epochs refer to these numbers.
They belong to one session of the device, and to one version of its part. They are in a file without a name, which
the system keeps in memory while there is room.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipar.errors import ProtocolError
from pipar.nn.micro_batches import Decoded, tensors_at
from pipar.tasks.losses import Targets
from pipar.tasks.task import Task
from pipar.tensors.crossing import Received
from pipar.tensors.inputs import mapped, rebuilt, tensors_of
from pipar.units import format_bytes
from pipar.wire.messages import Message, TensorPart, read_numbers


@dataclass
class _Kept:
    """What one device has sent in one epoch."""

    session: int
    epoch: int
    version: str
    samples: int  # that it has
    parts: tuple[TensorPart, ...] | None = None  # how the device described several tensors
    rows: list[Tensor] = field(default_factory=list)  # one for each tensor that crosses the cut
    targets: Targets | None = None  # as they are sent
    count: int = 0
    refusal: str | None = None  # why there is no room

    @property
    def is_complete(self) -> bool:
        return self.count == self.samples and self.refusal is None


class KeptActivations:
    """Keeps the activations of each device, at most `limit_bytes` of each.

    `version` returns what a device's part is at this time: activations of another version are never used.
    """

    def __init__(self, limit_bytes: int, version: Callable[[str], str], task: Task) -> None:
        self.limit_bytes = limit_bytes
        self._task = task
        self._version = version
        self._devices: dict[str, _Kept] = {}

    def epoch_of(self, device: str, session: int) -> int | None:
        """Return the epoch in which a device has sent all that is kept of it; None if something is missing."""
        kept = self._devices.get(device)
        if kept is None or not kept.is_complete or kept.session != session:
            return None
        if kept.version != self._version(device):
            del self._devices[device]
            return None
        return kept.epoch

    def begin(self, device: str, session: int, epoch: int, samples: int) -> None:
        """Keep from now on what a device sends in this epoch; all before is forgotten."""
        self._devices[device] = _Kept(session, epoch, self._version(device), samples)

    def add(self, device: str, decoded: Decoded) -> Decoded:
        """Keep a micro-batch if there is room, and return it."""
        kept, (activation, targets, _, _) = self._devices.get(device), decoded
        if kept is None or kept.refusal is not None:
            return decoded
        if kept.targets is None:
            self._make_room(kept, activation, targets)
        added = tensors_of(targets)
        end = kept.count + len(added[0])
        if kept.targets is not None and end <= kept.samples:
            for rows, tensor in zip(kept.rows, tensors_at(activation), strict=True):
                rows[kept.count : end] = tensor.detach()
            for known, tensor in zip(tensors_of(kept.targets), added, strict=True):
                known[kept.count : end] = tensor
            kept.count = end
        return decoded

    def _make_room(self, kept: _Kept, activation: Any, targets: Targets) -> None:
        tensors = tensors_at(activation)
        sizes = [kept.samples * tensor[0].numel() * tensor.element_size() for tensor in tensors]
        # A device may claim any number of samples: nothing is allocated above the limit.
        needed = sum(sizes) + kept.samples * self._task.size.sample_bytes
        if not 0 < needed <= self.limit_bytes:
            kept.refusal = f"they take {format_bytes(needed)}, and {format_bytes(self.limit_bytes)} are allowed"
            return
        buffer = _buffer(sum(sizes))
        if buffer is None:
            kept.refusal = f"there is no room for {format_bytes(sum(sizes))} in {tempfile.gettempdir()}"
            return
        kept.parts, at = activation.parts if isinstance(activation, Received) else None, 0
        for tensor, size in zip(tensors, sizes, strict=True):
            flat = torch.frombuffer(buffer, dtype=tensor.dtype, count=size // tensor.element_size(), offset=at)
            kept.rows.append(flat.reshape(kept.samples, *tensor.shape[1:]))
            at += size
        sent = self._task.as_sent(targets)
        kept.targets = mapped(sent, lambda one: one.new_empty((kept.samples, *one.shape[1:])))

    def recall(self, device: str, message: Message) -> Decoded:
        """Return the micro-batch that a message refers to; raise ProtocolError if it refers to anything else."""
        kept = self._devices.get(device)
        if kept is None or not kept.is_complete or kept.targets is None:
            raise ProtocolError(f"{message} refers to activations that the server does not have.")
        listed, counted = read_numbers(message, self._task.size.message_bytes)
        numbers = torch.from_numpy(np.frombuffer(listed, dtype="<u4").astype(np.int64))
        if int(numbers.max()) >= kept.samples:
            raise ProtocolError(f"{message} refers to activation {int(numbers.max())} of {kept.samples}.")
        rows = tuple(tensor.index_select(0, numbers) for tensor in kept.rows)
        activation = rows[0] if kept.parts is None else Received(rows, kept.parts)
        sent = rebuilt(kept.targets, (one.index_select(0, numbers) for one in tensors_of(kept.targets)))
        targets = self._task.as_read(sent)
        count = self._task.read_count(message, counted, targets)
        return Decoded(activation, targets, message.batch_samples, count)

    def refusal(self, device: str) -> str | None:
        """Return why what a device has sent is not kept; None if it is, or has not arrived yet."""
        kept = self._devices.get(device)
        return None if kept is None else kept.refusal

    def keep_only(self, devices: Collection[str]) -> None:
        """Free what is kept of all other devices."""
        self._devices = {device: kept for device, kept in self._devices.items() if device in devices}

    def forget_unfinished(self, device: str) -> None:
        """Free what a device has sent of an epoch that did not count."""
        if device in self._devices and not self._devices[device].is_complete:
            del self._devices[device]


def _buffer(size_bytes: int) -> mmap.mmap | None:
    """Return memory of this size in a file without a name; None if the disk has no room for it."""
    try:
        with tempfile.TemporaryFile(prefix="pipar-") as file:
            _reserve(file.fileno(), size_bytes)
            return mmap.mmap(file.fileno(), size_bytes)
    except OSError:
        return None


def _reserve(file: int, size_bytes: int) -> None:
    """Reserve space on the disk: writing to mapped memory without it would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size_bytes)
        return
    block = bytes(1 << 20)
    for _ in range(0, size_bytes, len(block)):
        os.write(file, block)
