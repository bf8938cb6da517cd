"""The real world on one machine: a server process and a process for each device, with gRPC over loopback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.synchronize import Event as EventFlag
from pathlib import Path

from pipar.device.interfaces import Equipment
from pipar.errors import InputError
from pipar.events import Event, Listening, Observer
from pipar.execution.lanes import ThreadLanes
from pipar.execution.spans import SERVER
from pipar.job.job import Job
from pipar.job.model_setup import make_learner, part_builder, scores_on_test_set, seed_dropout
from pipar.job.plans import make_plans
from pipar.job.torch_devices import spec_torch_device
from pipar.job.user_objects import UserObjects
from pipar.job.warm_up import warm_up, warm_up_device
from pipar.job.workload import Workload
from pipar.launch.assemble import ServerSetup, assemble_server, run_device
from pipar.launch.child_processes import ChildProcesses, EventSender, GracefulTermination, new_signal
from pipar.launch.device_lanes import DeviceThreadLanes
from pipar.launch.final_model import final_files
from pipar.launch.rehearsal import rehearse
from pipar.methods import Plan
from pipar.planner.background_search import SearchProcess
from pipar.profiling.memory import Memory
from pipar.profiling.profile import Profile
from pipar.recording.recorder import recorded
from pipar.server.enrolment import ClosedEnrolment
from pipar.storage.run_folder import RunFolder, save_result
from pipar.transport import open_files
from pipar.transport.addresses import check_listening
from pipar.transport.credentials import Tokens, new_token
from pipar.transport.tls import DeviceSecurity, ServerSecurity, is_loopback


def train_in_processes(
    job: Job,
    own: UserObjects,
    folder: Path,
    command: str,
    observe: Observer,
    *,
    pictures: bool = False,
    record: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train with real processes; that of the server writes the run's folder. Ctrl-C saves the epochs so far, and is
    raised again. No round begins after `should_stop` has returned True for an event.

    Every device gets a token through the pipe that starts its process, so that no other user of the machine can join.
    """
    stop = new_signal()

    def watch(event: Event) -> None:
        observe(event)
        if should_stop():
            stop.set()

    processes = ChildProcesses(watch)
    _ = job.update_noise  # chosen here once, so that devices need not import an accountant
    tokens = {spec.name: new_token() for spec in job.specs}
    try:
        task = _ServerTask(folder, command, Tokens.of(tokens), pictures, record, stop)
        processes.start(SERVER, _server_process, job, own, task)
        address = processes.wait_for_server()
        for spec in job.specs:
            place = _Place(address, DeviceSecurity(token=tokens[spec.name]))
            processes.start(spec.name, _device_process, job, own.only(spec.name), spec.name, place)
        processes.wait_for_end()
    finally:
        processes.end()


def check_address(address: str) -> None:
    """Raise if the server cannot listen on HOST:PORT, before any process is started."""
    if not is_loopback(address):
        raise InputError(
            f"Cannot listen on {address}: `pipar run` has no TLS, so it listens on loopback only, such as 127.0.0.1. "
            "Use `pipar server` for devices on other machines."
        )
    check_listening(address)


@dataclass(frozen=True)
class _ServerTask:
    """What the server's process is told in addition to its job."""

    folder: Path
    command: str
    tokens: Tokens
    pictures: bool
    record: bool
    stop: EventFlag  # that no further round is wanted


@dataclass(frozen=True)
class _Place:
    """Where a device finds its server, and how it identifies itself."""

    address: str
    security: DeviceSecurity


def _server_process(sender: EventSender, job: Job, own: UserObjects, task: _ServerTask) -> None:
    workload = Workload(job.config, own)
    learner = make_learner(job, workload)
    warm_up(job, workload)
    seed_dropout(job.config.run.seed, SERVER, learner.torch_device)
    run = RunFolder(task.folder, job, world="real", command=task.command, has_threads=True)
    termination = GracefulTermination()
    setup = ServerSetup(
        learner=learner,
        validation=workload.samples.held_out_batches("validation"),
        pool=partial(ThreadLanes, speed=job.config.server.speed, accelerator=learner.torch_device.accelerator),
        background=partial(ThreadLanes, nice=19),
        emit=run.epoch_recorder(sender.observe, pictures=task.pictures),
        observe=run.event_recorder(sender.observe),
        enrolment=ClosedEnrolment(job, partial(plans_for_profiles, job)),
        accountant=run.accountant,
        best=run.best,
        should_stop=task.stop.is_set,
    )
    try:
        with recorded(run, world="real", is_on=task.record) as (emitting, watching):
            setup = replace(setup, emit=emitting(setup.emit), observe=watching(setup.observe))
            termination.run(_serve(job, setup, task.tokens))
    finally:  # the epochs so far and the last global model are kept, even if it is interrupted
        save_result(run, final_files(run, learner, sender.observe), sender.observe)
    if not termination.requested():
        scores = scores_on_test_set(learner, workload, termination.requested)
        save_result(run, partial(run.add_test_scores, scores), sender.observe)


async def _serve(job: Job, setup: ServerSetup, tokens: Tokens) -> None:
    from pipar.transport.grpc_listener import (
        Listener,  # the fork server must not import grpc, which does not survive a fork
    )

    search_process = SearchProcess()
    server = assemble_server(job, replace(setup, search=search_process))
    open_files.raise_limit()
    listener = Listener(server.admit, security=ServerSecurity(tokens=tokens), refused=server.report_refused)
    host, _, _ = job.config.server.listen.rpartition(":")
    port = await listener.start(job.config.server.listen)
    setup.observe(Listening(f"{host}:{port}"))
    try:
        await server.train()
        await server.wait_until_left()
    finally:
        await search_process.close()
        await listener.stop()
        server.close()


def plans_for_profiles(job: Job, profiles: Mapping[str, Profile]) -> Mapping[str, Plan]:
    """Return the plans for the profiles that devices sent: those of the job, unless a profile differs."""
    brought = {**job.device_profiles, **profiles}
    return job.plans if brought == job.device_profiles else make_plans(replace(job, device_profiles=brought), rehearse)


def _device_process(sender: EventSender, job: Job, own: UserObjects, name: str, place: _Place) -> None:
    workload = Workload(job.config, own)
    GracefulTermination().run(_train_device(job, workload, name, place, sender.observe))


async def _train_device(job: Job, workload: Workload, name: str, place: _Place, observe: Observer) -> None:
    from pipar.transport.grpc_connect import connect

    spec = next(spec for spec in job.specs if spec.name == name)
    samples, build = workload.samples.keep_only_shard(name), part_builder(workload, name)
    evaluation = workload.evaluation_samples(name, Memory(job.device_profiles[name], spec.memory_bytes))
    warm_up_device(job, workload, name)
    computes_on = spec_torch_device(job.config, spec)
    seed_dropout(job.config.run.seed, name, computes_on)
    transport = await connect(place.address, security=place.security)
    lanes = DeviceThreadLanes(spec.speed, job.threads(name), computes_on.accelerator)
    profile = job.device_profiles[name]
    equipment = Equipment(samples, build, lanes, profile, job.guard(), evaluation=evaluation)
    await run_device(name, job.links[name], equipment, transport, keep_spans=job.traced_devices, observe=observe)
