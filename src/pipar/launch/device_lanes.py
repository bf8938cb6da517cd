"""The lanes of a device's process: how many threads compute its stages, and whether it may use all cores."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pipar.execution.clock import clock_machine
from pipar.execution.lanes import Accelerator, Lanes, ThreadLanes
from pipar.execution.spans import COMPUTE, EVALUATION, Recorder
from pipar.nn.runtime import compute_with
from pipar.profiling.cache import cache_folder

#: Open files with locks, which the system releases when this process ends.
_HELD: list[int] = []


@dataclass(frozen=True)
class DeviceThreadLanes:
    """Makes the lanes of a device: those that train or evaluate compute with `threads` threads, the others with one."""

    speed: float = 1.0
    threads: int = 1
    accelerator: Accelerator | None = None

    def __call__(self, lanes: Sequence[str], recorder: Recorder) -> Lanes:
        count = self.threads if set(lanes) & {COMPUTE, EVALUATION} else 1
        if self.threads == 1:
            return ThreadLanes(lanes, recorder, speed=self.speed, accelerator=self.accelerator)
        prepare = partial(compute_with, count)
        return ThreadLanes(lanes, recorder, speed=self.speed, accelerator=self.accelerator, prepare=prepare)


def claim_cores() -> bool:
    """Return whether this is the first deployed program on this machine, until it ends.

    Others leave the cores to it: several programs with as many threads as cores would slow each other down many times.
    """
    # Machines may share the folder, such as by NFS.
    path = cache_folder().parent / f"cores-{clock_machine()}.lock"
    try:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return False
    _HELD.append(handle)
    return True
