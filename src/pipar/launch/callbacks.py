"""Functions of the caller that are called after each epoch, and may end the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from pipar.errors import ConfigError
from pipar.events import EpochResult, Event


class Stop:
    """A callback returns `pipar.STOP` to end the training after the round that is being trained, with everything saved.

    >>> def enough(epoch):
    ...     return pipar.STOP if epoch.epoch == 1 else None
    >>> result = pipar.run(world="timing-only", settings=[*SMALL, "run.epochs=9"], callbacks=[enough])
    >>> len(result.epochs)
    2
    """

    def __repr__(self) -> str:
        return "pipar.STOP"


STOP: Final = Stop()
#: It gets the results of an epoch.
Callback = Callable[[EpochResult], Any]


class Callbacks:
    """Calls functions after each epoch; remembers whether one of them has returned STOP or raised an error."""

    def __init__(self, functions: Sequence[Callback]) -> None:
        if not isinstance(functions, Iterable):
            kind = "function" if callable(functions) else type(functions).__name__
            raise ConfigError(f"callbacks is a {kind}: give a list of functions, as in callbacks=[print].")
        self._functions = tuple(functions)
        for one in self._functions:
            if not callable(one):
                raise ConfigError(f"callbacks has a {type(one).__name__}: give functions that take an epoch's results.")
        self._error: Exception | None = None
        self._is_stopped = False

    def observe(self, event: Event) -> None:
        """Call the functions with the results of an epoch; after an error, no more of them."""
        if not isinstance(event, EpochResult) or self._error is not None:
            return
        try:
            for function in self._functions:
                self._is_stopped |= function(event) is STOP
        except Exception as error:  # noqa: BLE001 - raised again when the files are saved
            self._error = error

    def should_stop(self) -> bool:
        """Return whether no further round should be trained."""
        return self._is_stopped or self._error is not None

    def raise_error(self) -> None:
        """Raise the error of a function, as it was."""
        if self._error is not None:
            raise self._error
