"""Importing what takes long, as fast as that goes; a fork server imports it for the processes of a run.

As a module of the fork server's own, `pipar.launch.preloaded` calls `preload`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from importlib import import_module

#: What the server's and every device's process need; never grpc, which does not survive a fork.
FOR_CHILDREN = ("pipar.job.workload", "pipar.job.model_setup", "pipar.launch.assemble", "pipar.storage.run_folder")
#: What the process that prepares a training needs.
FOR_PREPARING = ("pipar.job.user_objects", "pipar.job.workload", "pipar.profiling.measure")


def import_all(modules: Iterable[str]) -> None:
    """Import modules without collecting garbage meanwhile, which would take a tenth of the time and find nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        for name in modules:
            import_module(name)
    finally:
        if collects:
            gc.enable()


def preload() -> None:
    """Import what child processes need, and exclude it from their collections, which would copy shared memory."""
    import_all(FOR_CHILDREN)
    gc.freeze()
