"""The real world on one machine: a server process and a process for each device, with gRPC over loopback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipar.device.interfaces import Equipment
from pipar.errors import InputError
from pipar.events import Listening, Observer
from pipar.execution.lanes import ThreadLanes
from pipar.execution.spans import SERVER
from pipar.job.job import Job
from pipar.job.model_setup import make_learner, measure_test_accuracy, part_builder, seed_dropout
from pipar.job.plans import make_plans
from pipar.job.warm_up import warm_up, warm_up_device
from pipar.job.workload import UserObjects, Workload
from pipar.launch.assemble import ServerSetup, assemble_server, run_device
from pipar.launch.child_processes import ChildProcesses, EventSender, GracefulTermination
from pipar.launch.rehearsal import rehearse
from pipar.methods import Plan
from pipar.planner.background_search import SearchProcess
from pipar.privacy.budget import PrivacyAccountant
from pipar.profiling.profile import Profile
from pipar.server.enrolment import ClosedEnrolment
from pipar.storage.run_folder import RunFolder, save_result
from pipar.transport import open_files
from pipar.transport.addresses import check_listening
from pipar.transport.tls import is_loopback


def train_in_processes(
    job: Job, own: UserObjects, folder: Path, command: str, observe: Observer, *, pictures: bool = False
) -> None:
    """Train with real processes; that of the server writes the run's folder. Ctrl-C saves the epochs so far, and is
    raised again.
    """
    processes = ChildProcesses(observe)
    _ = job.update_noise  # chosen here once, so that devices need not import an accountant
    try:
        processes.start(SERVER, _server_process, job, own, folder, command, pictures)
        address = processes.wait_for_server()
        for spec in job.specs:
            processes.start(spec.name, _device_process, job, own.only(spec.name), spec.name, address)
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


def _server_process(
    sender: EventSender, job: Job, own: UserObjects, folder: Path, command: str, pictures: bool
) -> None:
    workload = Workload(job.config, own)
    learner = make_learner(job, workload)
    warm_up(job, workload)
    seed_dropout(job.config.run.seed, SERVER)
    run = RunFolder(folder, job, world="real", command=command)
    termination = GracefulTermination()
    try:
        emit = run.epoch_recorder(sender.observe, pictures=pictures)
        termination.run(_serve(job, workload, learner, emit, run.event_recorder(sender.observe), run.accountant))
    finally:  # the epochs so far and the last global model are kept, even if it is interrupted
        state = partial(run.finish, weights=learner.packed_state(), weights_sha256=learner.sha256())
        save_result(run, state, sender.observe)
    if not termination.requested():
        accuracy = measure_test_accuracy(learner, workload, termination.requested)
        save_result(run, partial(run.add_test_accuracy, accuracy), sender.observe)


async def _serve(
    job: Job, workload: Workload, learner: Any, emit: Any, observe: Observer, accountant: PrivacyAccountant
) -> None:
    from pipar.transport.grpc import Listener  # the fork server must not import grpc, which does not survive a fork

    search_process = SearchProcess()
    server = assemble_server(
        job,
        ServerSetup(
            learner=learner,
            validation=workload.held_out_batches("validation"),
            pool=partial(ThreadLanes, speed=job.config.server.speed),
            background=partial(ThreadLanes, nice=19),
            emit=emit,
            observe=observe,
            enrolment=ClosedEnrolment(job, partial(plans_for_profiles, job)),
            search=search_process,
            accountant=accountant,
        ),
    )
    open_files.raise_limit()
    listener = Listener(server.admit)
    host, _, _ = job.config.server.listen.rpartition(":")
    port = await listener.start(job.config.server.listen)
    observe(Listening(f"{host}:{port}"))
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


def _device_process(sender: EventSender, job: Job, own: UserObjects, name: str, address: str) -> None:
    workload = Workload(job.config, own)
    GracefulTermination().run(_train_device(job, workload, name, address, sender.observe))


async def _train_device(job: Job, workload: Workload, name: str, address: str, observe: Observer) -> None:
    from pipar.transport.grpc import connect  # not before the fork, either

    speed = next(spec.speed for spec in job.specs if spec.name == name)
    samples, build = workload.keep_only_shard(name), part_builder(workload, name)
    warm_up_device(job, workload, name)
    seed_dropout(job.config.run.seed, name)
    transport = await connect(address)
    lanes, profile = partial(ThreadLanes, speed=speed), job.device_profiles[name]
    equipment = Equipment(samples, build, lanes, profile, job.guard())
    await run_device(name, job.links[name], equipment, transport, keep_spans=job.traced_devices, observe=observe)
