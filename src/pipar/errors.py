"""Everything that pipar raises on purpose, split by what the reader can do about it.

Each message is one sentence or two: what was given, what is allowed, what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PiparError(Exception):
    """The base of every error that pipar raises on purpose."""


class InputError(PiparError):
    """Something that a person gave is not usable; the command line exits 2."""


class ConfigError(InputError):
    """A key or value of the configuration is unknown or outside its range."""


class PlanError(InputError):
    """A split point or a number of micro-batches does not fit the model or the batch."""


class TooLittleMemoryError(PlanError):
    """No plan fits into a device's memory."""


class ModelError(InputError):
    """A network cannot be built, or does not fit the data."""


class DataError(InputError):
    """A dataset is missing, damaged or too small."""


class ProtocolError(PiparError):
    """The peer said something that the protocol does not allow."""


class VersionError(ProtocolError):
    """The peer speaks another version of the protocol."""


class UnusableModelError(ProtocolError):
    """A device brought back a model that cannot be used."""

    def __init__(self, device: str, message: str) -> None:
        super().__init__(message)
        self.device = device


class UnusableProfileError(ProtocolError):
    """A device brought a profile that nothing can be planned with."""

    def __init__(self, device: str, message: str) -> None:
        super().__init__(message)
        self.device = device


class LinkError(PiparError):
    """The connection to a peer was lost or could not be made."""


class SessionOverError(LinkError):
    """The server does not know this session any more, or has ended it: a device may join anew."""


class ServerStopsError(SessionOverError):
    """The server ends all sessions in good order, and may be back."""


class CredentialError(LinkError):
    """The other side does not take what identifies us, or we do not take what identifies it: trying again is no use."""


class TrainingError(PiparError):
    """Training could not go on."""


class PrivacyError(TrainingError):
    """A device's own configuration does not let that be sent of it."""


class BudgetSpentError(PrivacyError):
    """A device has nothing left of its privacy budget, and sends no more."""


class CheckpointError(PiparError):
    """A checkpoint could not be saved or read; the training can go on without it."""


class TooFewDevicesError(TrainingError):
    """Fewer devices have ended a round than its aggregation needs."""


def forget_frames(error: Exception) -> None:
    """Let go of the functions that an error of ours came through: kept with it, they keep what they had, even models.

    Any other error is a mistake in a program, and they show where.
    """
    if isinstance(error, PiparError):
        error.__traceback__ = error.__context__ = error.__cause__ = None


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'wifi'?)" if one of the known names is close to what was given, else nothing."""
    close = difflib.get_close_matches(given.lower(), list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
