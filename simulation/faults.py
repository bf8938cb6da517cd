"""Applying the faults of a scenario to the network, the programs, the disk and the clock of a world."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from pipar.execution.clock import VirtualTimeLoop
from simulation.device import SimulatedDevice
from simulation.environment import Environment
from simulation.network import DOWN, UP
from simulation.scenario import DEVICE_FAULTS, Fault
from simulation.server import SimulatedServer


async def apply_faults(
    environment: Environment, server: SimulatedServer, devices: Mapping[str, SimulatedDevice]
) -> None:
    """Apply every fault at its time."""
    loop = asyncio.get_running_loop()
    for fault in environment.scenario.faults:
        await asyncio.sleep(max(0.0, fault.at_s - loop.time()))
        environment.checks.note("fault", f"{fault.kind} {fault.device} {fault.seconds:g} s, choice {fault.choice}")
        if fault.kind in DEVICE_FAULTS:
            _hit_device(environment, devices[fault.device], fault)
        else:
            _hit_server(server, fault)


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


def _hit_server(server: SimulatedServer, fault: Fault) -> None:
    match fault.kind:
        case "crash-server":
            server.crash(fault.seconds, silently=bool(fault.choice & 2))
        case "stop-server":
            server.stop(fault.seconds)
        case "power-loss" if server.disk is not None:
            server.disk.power_fails_in = fault.choice % 9
        case "full-disk" if server.disk is not None:
            server.disk.full_for += 1 + fault.choice % 2
        case "clock-jump":
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop)
            loop.leap(fault.seconds)
