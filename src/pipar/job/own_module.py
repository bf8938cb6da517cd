"""The user's own module: copied in this process, pickled only for another one."""

from __future__ import annotations

import copy

import cloudpickle
from torch import nn

from pipar.errors import ModelError, describe


class OwnModule:
    """A module that stays the user's: a training gets copies of it.

    Another process gets it as cloudpickle bytes, so that classes defined in a notebook work; such bytes are never
    loaded from elsewhere. They are not loaded in the process that made them either: that would replace the methods of
    the user's own classes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: nn.Module | None = module
        self._pickled: bytes | None = None

    def copy(self) -> nn.Module:
        """Return a copy of the module with its weights; its class is not copied."""
        if self._module is None:
            assert self._pickled is not None
            self._module = cloudpickle.loads(self._pickled)  # made by the process that started this one
        try:
            return copy.deepcopy(self._module)
        except Exception as error:
            raise ModelError(
                f"{type(self._module).__name__} cannot be copied, which training needs: {describe(error)}."
            ) from error

    def __getstate__(self) -> dict[str, object]:
        if self._pickled is None:  # once for all processes
            self._pickled = cloudpickle.dumps(self._module)
        return {"_module": None, "_pickled": self._pickled}
