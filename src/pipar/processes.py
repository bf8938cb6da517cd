"""The real world on one machine: a server process and a process for each device, talking gRPC over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pipar.errors import InputError, PiparError, TrainingError
from pipar.events import Event, Listening, Observer, Progress
from pipar.job import Job
from pipar.workload import Own, Workload

#: What the fork server imports once for all processes; never grpc, which does not survive a fork. The first optimiser
#: of a process imports torch._dynamo, for more than a second.
_PRELOAD = ["torch", "torch._dynamo", "pipar.workload", "pipar.torchside", "pipar.assemble", "pipar.results"]
_PROGRESS_EVERY_S = 0.2
_GRACE_S = 20.0


@dataclass(frozen=True)
class Failure:
    """What a child process failed with, as it travels to this one."""

    message: str
    is_input: bool


def train_in_processes(job: Job, own: Own, folder: Path, command: str, observe: Observer) -> None:
    """Train with real processes; the server's writes the run's folder. Ctrl-C saves what there is and goes on up."""
    household = _Household(observe)
    try:
        household.start("server", _server_process, job, own, folder, command)
        address = household.wait_for_server()
        for spec in job.specs:
            household.start(spec.name, _device_process, job, own.only(spec.name), spec.name, address)
        household.wait_for_end()
    finally:
        household.end()


def check_address(address: str) -> None:
    """Raise one sentence if the server cannot listen on HOST:PORT: before anything is started for it."""
    host, _, port = address.rpartition(":")
    try:
        family, *_, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        socket.create_server(place[:2], family=family).close()
    except OSError as error:
        is_name = isinstance(error, socket.gaierror)
        why = "there is no such host" if is_name else os.strerror(error.errno or 0).lower()
        raise InputError(f"Cannot listen on {address}: {why}.") from None


class _Household:
    """The processes of one run, and what they say."""

    def __init__(self, observe: Observer) -> None:
        self._observe = observe
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._processes: dict[str, BaseProcess] = {}
        self._connections: dict[Connection, str] = {}
        self._address = ""

    def start(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_child, args=(theirs, target, *arguments), name=name, daemon=True)
        with _without_main():
            process.start()
        theirs.close()
        self._processes[name] = process
        self._connections[ours] = name

    def wait_for_server(self) -> str:
        """Return the server's address when it listens."""
        while not self._address:
            self._take_in()
        return self._address

    def wait_for_end(self) -> None:
        """Pass on what the processes say until all have ended."""
        while self._connections:
            self._take_in()

    def _take_in(self) -> None:
        for connection in wait(list(self._connections)):
            assert isinstance(connection, Connection)
            try:
                said = connection.recv()
            except EOFError:
                self._ended(self._connections.pop(connection))
                continue
            self._heard(said)

    def _heard(self, said: Event | Failure) -> None:
        if isinstance(said, Failure):
            raise (InputError if said.is_input else TrainingError)(said.message)
        if isinstance(said, Listening):
            self._address = said.address
        self._observe(said)

    def _ended(self, name: str) -> None:
        process = self._processes[name]
        process.join()
        code = process.exitcode or 0
        if code != 0:
            how = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
            raise TrainingError(f"The process of {name} {how}.")

    def end(self) -> None:
        """End what still runs, the server first: it saves before its devices are gone. Nothing is left behind."""
        for process in self._processes.values():
            if process.is_alive():
                process.terminate()
                process.join(_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep children from importing the caller's script again: a script without a __main__ guard would start anew."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# --- in the children


def _child(connection: Connection, target: Callable[..., None], *arguments: Any) -> None:
    """Run one child's program; a failure becomes an event for the parent."""
    import torch

    from pipar.nn.memory import keep_freed_memory

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        target(connection, *arguments)
    except PiparError as error:
        _say(connection, Failure(str(error), isinstance(error, InputError)))
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - the process ends here, and the parent is told why
        _say(connection, Failure(f"{type(error).__name__}: {error}", False))
        sys.exit(1)


def _say(connection: Connection, said: Event | Failure) -> None:
    with contextlib.suppress(OSError):  # a parent that is gone needs no telling
        connection.send(said)


def _observer(connection: Connection) -> Observer:
    """Return an observer that passes events on to the parent, progress a few times a second at most."""
    last = 0.0

    def observe(event: Event) -> None:
        nonlocal last
        now = time.monotonic()
        if isinstance(event, Progress) and now - last < _PROGRESS_EVERY_S:
            return
        last = now if isinstance(event, Progress) else last
        _say(connection, event)

    return observe


def _run_until_terminated(main: Coroutine[Any, Any, None]) -> bool:
    """Run a coroutine; return False if SIGTERM cut it short."""

    async def supervised() -> bool:
        task = asyncio.ensure_future(main)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            return False
        return True

    return asyncio.run(supervised())


def _server_process(connection: Connection, job: Job, own: Own, folder: Path, command: str) -> None:
    from pipar.results import RunFolder
    from pipar.torchside import make_learner, test_accuracy, warm_up

    workload = Workload(job.config, own)
    learner = make_learner(job, workload)
    warm_up(job, workload)
    run = RunFolder(folder, job, world="real", command=command)
    observe = _observer(connection)
    whole = False
    try:
        whole = _run_until_terminated(_serve(job, workload, learner, run, observe))
    finally:  # whatever ended the training, the epochs so far and the last global model are kept
        accuracy = test_accuracy(learner, workload) if whole else None
        run.finish(test_accuracy=accuracy, weights=learner.packed_state(), weights_sha256=learner.sha256())


async def _serve(job: Job, workload: Workload, learner: Any, run: Any, observe: Observer) -> None:
    from functools import partial

    from pipar.assemble import assemble_server
    from pipar.compute import ThreadCompute
    from pipar.link.grpc import Listener

    def emit(result: Any, spans: Any) -> None:
        run.add_epoch(result, spans)
        observe(result)

    server = assemble_server(
        job,
        learner,
        workload.held_out_batches("validation"),
        pool=partial(ThreadCompute, speed=job.config.server.speed),
        background=partial(ThreadCompute, nice=19),
        emit=emit,
        observe=observe,
    )
    listener = Listener(server.admit)
    host, _, _ = job.config.server.listen.rpartition(":")
    port = await listener.start(job.config.server.listen)
    observe(Listening(f"{host}:{port}"))
    try:
        await server.train()
        await server.farewell()
    finally:
        await listener.stop()
        server.close()


def _device_process(connection: Connection, job: Job, own: Own, name: str, address: str) -> None:
    workload = Workload(job.config, own)
    _run_until_terminated(_live(job, workload, name, address, _observer(connection)))


async def _live(job: Job, workload: Workload, name: str, address: str, observe: Observer) -> None:
    from functools import partial

    from pipar.assemble import run_device
    from pipar.compute import ThreadCompute
    from pipar.link.grpc import connect
    from pipar.torchside import part_builder, warm_up

    speed = next(spec.speed for spec in job.specs if spec.name == name)
    samples = workload.own_shard(name)
    build = part_builder(workload)
    warm_up(job, workload)
    transport = await connect(address)
    lanes = partial(ThreadCompute, speed=speed)
    await run_device(job, name, samples, build, transport, compute=lanes, observe=observe)
