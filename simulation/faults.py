"""Applying the faults of a scenario to the network, the programs, the disk and the clock of a world."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from pipar.execution.clock import VirtualTimeLoop
from pipar.transport.interface import Transport
from simulation.device import SimulatedDevice
from simulation.disk import READ_ERRORS
from simulation.environment import Environment
from simulation.imposter import Imposter
from simulation.intruder import Intruder
from simulation.network import DOWN, UP
from simulation.processes import Process
from simulation.scenario import DEVICE_FAULTS, Fault
from simulation.server import SimulatedServer
from simulation.tampering import choose_tamper


async def apply_faults(
    environment: Environment, server: SimulatedServer, devices: Mapping[str, SimulatedDevice]
) -> None:
    """Apply every fault at its time."""
    loop, period, began_s = asyncio.get_running_loop(), 0, 0.0
    for fault in environment.scenario.faults:
        if fault.after_round != period:
            await environment.checks.until_over(fault.after_round)
            period, began_s = fault.after_round, loop.time()
        await asyncio.sleep(max(0.0, began_s + fault.at_s - loop.time()))
        environment.checks.note("fault", f"{fault.kind} {fault.device} {fault.seconds:g} s, choice {fault.choice}")
        if fault.kind in DEVICE_FAULTS:
            _hit_device(environment, devices[fault.device], fault)
        else:
            _hit_server(environment, server, fault)


def _hit_device(environment: Environment, device: SimulatedDevice, fault: Fault) -> None:
    network = environment.network
    conditions = network.conditions[fault.device]
    match fault.kind:
        case "cut":
            network.cut(fault.device, fault.seconds, (None, None, UP, DOWN)[fault.choice % 4])
        case "one-way":
            network.lose_one_way(fault.device, fault.seconds, UP if fault.choice & 1 else DOWN)
        case "slow":
            conditions.slow_until = asyncio.get_running_loop().time() + fault.seconds
            conditions.slow_s = 0.01 + (fault.choice % 100) / 200
        case "delay":
            conditions.late_s.extend([fault.seconds] * (1 + fault.choice % 3))
        case "duplicate":
            conditions.duplicates += 1 + fault.choice % 5
        case "corrupt":
            conditions.damages.append(fault.choice)
        case "crash-device":
            device.crash(fault.seconds, silently=bool(fault.choice & 2))
        case "poison":
            device.is_poisoned = True
        case "hostile-device":
            device.turn_hostile(choose_tamper(fault.choice), 2 * fault.seconds)
        case "intruder":
            _intrude(environment, fault)


def _intrude(environment: Environment, fault: Fault) -> None:
    """Let a peer attack the server over its own link, with the credential of a member if it has one."""
    network, processes = environment.network, environment.processes
    link = f"intruder at {fault.device}"
    has_credentials = environment.scenario.has_credentials

    async def dial(poses_as: str) -> Transport:
        return network.connect(link, poses_as if has_credentials else None)

    intruder = Intruder(environment.scenario, environment.training.profile, fault.device, fault.choice, dial)
    if intruder.poses_as == fault.device or not has_credentials:
        environment.checks.excuse(fault.device)  # it may take its place, and it is refused by its name
    process = environment.process(link, link)
    processes.start(process, intruder.attack())
    asyncio.get_running_loop().call_later(fault.seconds, _end_intruder, environment, process, link)


def _end_intruder(environment: Environment, process: Process, link: str) -> None:
    environment.processes.kill(process, restart_after_s=0.0)
    environment.network.lose_device(link, silently=False)


def _hit_server(environment: Environment, server: SimulatedServer, fault: Fault) -> None:
    match fault.kind:
        case "crash-server":
            server.crash(fault.seconds, silently=bool(fault.choice & 2))
        case "stop-server":
            server.stop(fault.seconds)
        case "power-loss":
            server.troubles.power_fails_in = fault.choice % 9
        case "full-disk":
            server.troubles.full_for += 1 + fault.choice % 2
        case "full-results":
            server.troubles.results_full_for += 1 + fault.choice % 4
        case "slow-disk":
            server.troubles.save_s.extend([fault.seconds] * (1 + fault.choice % 2))
        case "unreadable":
            server.make_unreadable(fault.seconds, READ_ERRORS[fault.choice % len(READ_ERRORS)])
            server.crash(fault.seconds / 2, silently=bool(fault.choice & 2))
        case "misdirected":
            server.overwrite_checkpoint()
            if fault.choice & 4:
                server.crash(fault.seconds, silently=bool(fault.choice & 2))
        case "second-server":
            server.start_second(fault.seconds)
        case "imposter":
            is_verified = environment.scenario.has_credentials
            environment.network.replace_server(Imposter(fault.choice, is_verified=is_verified), fault.seconds)
            if fault.choice & 1:
                server.crash(fault.seconds, silently=bool(fault.choice & 2))
        case "clock-jump":
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop)
            loop.leap(fault.seconds)
