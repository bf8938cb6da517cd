"""An object that the user passed: used as it is in this process, pickled only for another one."""

from __future__ import annotations

from typing import Generic, TypeVar

import cloudpickle

T = TypeVar("T")


class PassedObject(Generic[T]):
    """An object that another process gets as cloudpickle bytes, so that what a notebook defines works.

    Such bytes are never loaded from elsewhere. They are not loaded in the process that made them either: that would
    replace the methods of the user's own classes.
    """

    def __init__(self, content: T) -> None:
        self._content: T | None = content
        self._pickled: bytes | None = None

    def get(self) -> T:
        """Return the object."""
        if self._content is None:
            assert self._pickled is not None
            self._content = cloudpickle.loads(self._pickled)  # made by the process that started this one
        assert self._content is not None
        return self._content

    def __getstate__(self) -> dict[str, object]:
        if self._pickled is None:  # once for all processes
            self._pickled = cloudpickle.dumps(self._content)
        return {"_content": None, "_pickled": self._pickled}
