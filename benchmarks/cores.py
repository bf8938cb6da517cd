"""All cores for one device: the server's stages of a batch with two cores, and a device's with two threads.

The server computes micro-batches of one device as in training, through lanes that are threads, one at a time and two at
a time, in turns. Its gradients have to have the same bits. A device's forwards and backwards are computed with one
thread and with two; the order of additions differs, so the largest difference of its gradients is a result, too.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn

from benchmarks.record import Claim
from pipar.cutting.split import split_model
from pipar.execution.lanes import ThreadLanes
from pipar.execution.spans import COMPUTE, CORE, SERVER, Recorder
from pipar.execution.work import Work
from pipar.launch.device_lanes import DeviceThreadLanes
from pipar.networks.models import build_model
from pipar.nn.device_part import TorchDevicePart
from pipar.nn.micro_batches import Decoded, cut_micro_batches
from pipar.nn.optimizers import sgd
from pipar.nn.runtime import keep_freed_memory
from pipar.nn.server_part import TorchServerPart
from pipar.tasks.task import classification

_SHAPE, _CLASSES, _BATCH, _MICRO_BATCHES = (3, 32, 32), 10, 100, 8
#: Split points that leave the server, and the device, most of the network.
_EARLY, _LATE = 1, {"vgg16": 13, "resnet18": 8}
_MOST_SHARE = 0.65
_REPETITIONS = 5

#: Runs one batch; returns the seconds that it took.
Batch = Callable[[], float]


def measure(_: Path) -> tuple[list[Claim], dict[str, object]]:
    """Return the shares of time that two cores need, with their bounds."""
    torch.set_num_threads(1)
    keep_freed_memory()
    claims: list[Claim] = []
    details: dict[str, object] = {"batch": _BATCH, "micro_batches": _MICRO_BATCHES, "samples": list(_SHAPE)}
    for name in _LATE:
        server = _of_server(name)
        share = server["two_cores_s"] / server["one_core_s"]
        claims += [
            Claim(f"{name}, one device: a batch on the server, two cores / one", share, "", most=_MOST_SHARE),
            Claim(f"{name}: largest difference of the server's gradients", server["difference"], "", most=0.0),
        ]
        device = _of_device(name)
        share = device["two_threads_s"] / device["one_thread_s"]
        claims.append(
            Claim(f"{name}, P={_LATE[name]}: a batch on a device, two threads / one", share, "", most=_MOST_SHARE)
        )
        details[name] = {"server": server, "device": device}
    return claims, details


def _in_turns(one: Batch, two: Batch) -> tuple[float, float]:
    """Return the median seconds of each, after a first time that does not count."""
    times = [(one(), two()) for _ in range(1 + _REPETITIONS)][1:]
    return median(first for first, _ in times), median(second for _, second in times)


def _samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(_BATCH, *_SHAPE, generator=generator), torch.randint(_CLASSES, (_BATCH,), generator=generator)


def _network(name: str) -> nn.Sequential:
    return build_model(name, input_shape=_SHAPE, classes=_CLASSES)


def _difference(one: nn.Module, two: nn.Module) -> float:
    """Return the largest difference of the gradients, relative to the largest gradient."""
    pairs = [(a.grad, b.grad) for a, b in zip(one.parameters(), two.parameters(), strict=True)]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    largest = max(a.abs().max().item() for a, _ in known)
    return max((a - b).abs().max().item() for a, b in known) / largest


def _of_server(name: str) -> dict[str, float]:
    inputs, targets = _samples()
    first, rest = split_model(_network(name), _EARLY)
    with torch.no_grad():
        activations = first(inputs)
    parts = [
        TorchServerPart(rest, sgd(), task=classification(_CLASSES), at_once=True)
        for rest in (rest, copy.deepcopy(rest))
    ]

    def pieces() -> list[Decoded]:
        cut = zip(activations.chunk(_MICRO_BATCHES), targets.chunk(_MICRO_BATCHES), strict=True)
        return [Decoded(a.clone(), t, _BATCH, _BATCH) for a, t in cut]

    def one_after_another(part: TorchServerPart) -> float:
        return asyncio.run(_on_cores(1, [partial(_serve, part, each) for each in pieces()], part))

    def two_at_once(part: TorchServerPart) -> float:
        part.begin_batch_at_once()
        jobs = [partial(_serve_at_once, part, n, each) for n, each in enumerate(pieces(), start=1)]
        return asyncio.run(_on_cores(2, jobs, part))

    one_s, two_s = _in_turns(partial(one_after_another, parts[0]), partial(two_at_once, parts[1]))
    return {
        "one_core_s": one_s,
        "two_cores_s": two_s,
        "difference": _difference(parts[0].module, parts[1].module),
    }


def _serve(part: TorchServerPart, decoded: Decoded) -> object:
    return part.backward(part.forward(decoded))


def _serve_at_once(part: TorchServerPart, number: int, decoded: Decoded) -> object:
    return part.backward_at_once(number, part.forward_at_once(decoded))


async def _on_cores(cores: int, jobs: list[Callable[[], object]], part: TorchServerPart) -> float:
    """Return how long some jobs take on this many cores of a server, as the first of a batch."""
    part.module.zero_grad(set_to_none=True)
    lanes = ThreadLanes([f"{CORE} {number}" for number in range(cores)], Recorder(SERVER))
    await asyncio.gather(*(lanes.run((Work("fs"), lambda: None)) for _ in range(cores)))  # starts the threads
    start = time.perf_counter()
    await asyncio.gather(*(lanes.run((Work("fs"), job)) for job in jobs))
    seconds = time.perf_counter() - start
    lanes.close()
    return seconds


def _of_device(name: str) -> dict[str, float]:
    inputs, targets = _samples()
    split_point = _LATE[name]
    networks = [split_model(_network(name), split_point)[0] for _ in range(2)]
    parts = [TorchDevicePart(network, sgd(), has_loss=False) for network in networks]

    def with_threads(threads: int) -> float:
        return asyncio.run(_on_device(parts[threads - 1], threads, inputs, targets))

    one_s, two_s = _in_turns(partial(with_threads, 1), partial(with_threads, 2))
    return {"one_thread_s": one_s, "two_threads_s": two_s, "difference": _difference(*networks)}


async def _on_device(part: TorchDevicePart, threads: int, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return how long the forwards and backwards of a batch take on a device with this many threads."""
    part.module.zero_grad(set_to_none=True)
    sizes = [len(piece) for piece in inputs.chunk(_MICRO_BATCHES)]
    pieces = cut_micro_batches(inputs, targets, sizes)
    lane = DeviceThreadLanes(threads=threads)([COMPUTE], Recorder("device"))
    await lane.run((Work("fc"), lambda: None))
    start = time.perf_counter()
    for number, piece in enumerate(pieces, start=1):
        output = await lane.run((Work("fc"), partial(part.forward, number, piece)))
        gradient = torch.ones_like(output)
        await lane.run((Work("bc"), partial(part.backward, number, gradient)))
    seconds = time.perf_counter() - start
    lane.close()
    return seconds
