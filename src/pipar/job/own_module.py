"""The user's own module, of which a training gets copies."""

from __future__ import annotations

import copy

from torch import nn

from pipar.errors import ModelError, describe
from pipar.job.own_object import OwnObject


class OwnModule(OwnObject[nn.Module]):
    """A module that stays the user's: a training gets copies of it."""

    def copy(self) -> nn.Module:
        """Return a copy of the module with its weights; its class is not copied."""
        module = self.get()
        try:
            return copy.deepcopy(module)
        except Exception as error:
            raise ModelError(
                f"{type(module).__name__} cannot be copied, which training needs: {describe(error)}."
            ) from error
