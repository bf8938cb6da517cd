"""The cuts of a configuration's network, whatever its method."""

from __future__ import annotations

from pipar.cutting.cut_points import CutList
from pipar.data.catalog import dataset_info
from pipar.events import Observer, ignore
from pipar.job.user_objects import UserObjects
from pipar.job.workload import Workload
from pipar.settings.config import Config
from pipar.tensors.inputs import InputForm


def find_cuts(config: Config, observe: Observer = ignore) -> CutList:
    """Return where the network can be cut; a named dataset need not be on this machine."""
    config = config.model_copy(update={"run": config.run.model_copy(update={"method": "pipar"})})
    own = None
    if config.data.factory is None:
        info = dataset_info(config.data.name)
        own = UserObjects(
            form=InputForm.given(config.data.shape or info.shape), classes=config.data.classes or info.classes
        )
    workload = Workload(config, own)
    workload.observe = observe
    return workload.cuts()
