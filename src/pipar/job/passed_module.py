"""The user's own module, of which a training gets copies."""

from __future__ import annotations

from torch import nn

from pipar.job.passed_object import PassedObject
from pipar.networks.models import copy_of


class PassedModule(PassedObject[nn.Module]):
    """A module that stays the user's: a training gets copies of it."""

    def copy(self) -> nn.Module:
        """Return a copy of the module with its weights; its class is not copied."""
        return copy_of(self.get())
