"""The cuts of a configuration's network, whatever its method."""

from __future__ import annotations

from pipar.cutting.cut_points import CutList
from pipar.events import Observer, ignore
from pipar.job.user_objects import UserObjects
from pipar.job.workload import Workload
from pipar.settings.config import Config


def find_cuts(config: Config, observe: Observer = ignore) -> CutList:
    """Return where the network can be cut; a named dataset need not be on this machine."""
    config = config.model_copy(update={"run": config.run.model_copy(update={"method": "pipar"})})
    workload = Workload(config, UserObjects().with_catalog_form(config))
    workload.observe = observe
    return workload.cuts()
