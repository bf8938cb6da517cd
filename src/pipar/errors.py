"""The errors that pipar raises on purpose, by what the reader can do about them.

Each message is one sentence or two: what was given, what is allowed, what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PiparError(Exception):
    """The base of every error that pipar raises on purpose.

    >>> try:
    ...     pipar.plan(settings=["run.epochs=none"])
    ... except pipar.PiparError as error:
    ...     print(str(error)[:19])
    run.epochs = 'none'
    """


class InputError(PiparError):
    """The user's input is not usable; the command line exits with 2."""


class AddressInUseError(InputError):
    """A program cannot listen on an address now; it may be free later."""


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
    """The peer sent something that the protocol does not allow."""


class TryAgainError(ProtocolError):
    """A device is refused for now, and may try again."""


class VersionError(ProtocolError):
    """The peer uses another version of the protocol; `device` is what it calls itself, if that can be read."""

    def __init__(self, message: str, device: str = "") -> None:
        super().__init__(message)
        self.device = device


class UnusableModelError(ProtocolError):
    """A device returned a model that cannot be used."""

    def __init__(self, device: str, message: str) -> None:
        super().__init__(message)
        self.device = device


class UnusableStepError(ProtocolError):
    """A device's batch would make a model that it shares with others unusable; the model has not changed."""


class NoBudgetLeftError(ProtocolError):
    """A device has no release left by the count that the server knows, with updates of this noise multiplier."""

    def __init__(self, message: str, multiplier: float) -> None:
        super().__init__(message)
        self.multiplier = multiplier


class OtherNetworkError(ProtocolError):
    """The configuration of a device describes another network than the server's."""


class UnusableProfileError(ProtocolError):
    """A device sent a profile that cannot be used for planning."""

    def __init__(self, device: str, message: str) -> None:
        super().__init__(message)
        self.device = device


class LinkError(PiparError):
    """The connection to a peer was lost or could not be made."""


class SessionOverError(LinkError):
    """The server no longer knows this session, or has ended it; the device may join again."""


class ServerStopsError(SessionOverError):
    """The server is stopping and has ended all sessions; it may start again."""


class CredentialError(LinkError):
    """One side refuses the other's credentials, or what answers at the server's address is not a pipar server.

    It ends a device that has never been admitted. A device that has been admitted keeps trying: anyone may answer at
    an address for a while. `device` is whose credential it is, if that is proved.
    """

    def __init__(self, message: str = "", device: str = "") -> None:
        super().__init__(message)
        self.device = device


class DeviceRefusedError(CredentialError):
    """A server whose certificate was verified refuses this device's credential; trying again does not help."""


class TrainingError(PiparError):
    """Training cannot continue."""


class NetworkRefusedError(TrainingError):
    """The server trains another network than that of this device's configuration; trying again does not help."""


class OrdersError(TrainingError):
    """The server orders something that this device has not agreed to."""


class PrivacyError(TrainingError):
    """A device's own configuration does not allow it to send this."""


class BudgetSpentError(PrivacyError):
    """A device has used its privacy budget, and sends no more updates."""


class CheckpointError(PiparError):
    """A checkpoint could not be saved or read; training can continue without it."""


class StorageError(PiparError):
    """A file of a run cannot be written now, for example on a full disk; another attempt may succeed."""


class UnknownCheckpointError(CheckpointError):
    """A checkpoint is not known to be damaged, but this program cannot read it: it must be kept."""


class TooFewDevicesError(TrainingError):
    """Fewer devices have finished a round than its aggregation needs."""


#: More of a text is not needed to understand it; a peer may send a megabyte.
_LONGEST_TEXT = 1000
_LONGEST_CAUSE = 300


def peer_text(text: object, most: int = _LONGEST_TEXT) -> str:
    """Return a text that a peer has sent for a message or a log line: short, and without unprintable characters."""
    shown = one_line(str(text)[:most])
    return f"{shown} ..." if len(str(text)) > most else shown


def one_line(text: str) -> str:
    """Return the text with unprintable characters escaped: a peer cannot forge a line, or move a cursor."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def describe(error: BaseException) -> str:
    """Return an unexpected error in one line: "ValueError: Expected more than 1 value per channel"."""
    text = one_line(" ".join(str(error).split())[:_LONGEST_CAUSE])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


#: What torch says if the system has no memory for it, or an accelerator has none.
_NO_MEMORY = ("allocate memory", "out of memory")


def is_lack_of_memory(error: BaseException) -> bool:
    """Return whether an error means that this machine has no memory left; torch has no type of its own for it."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(one in str(error) for one in _NO_MEMORY)
    )


def forget_frames(error: Exception) -> None:
    """Drop the traceback of an expected error: kept with it, its frames keep their variables alive, even models.

    Other errors are mistakes in a program, and keep theirs.
    """
    if isinstance(error, PiparError):
        error.__traceback__ = error.__context__ = error.__cause__ = None


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'wifi'?)" if one of the known names is close to what was given, else nothing."""
    close = difflib.get_close_matches(given.lower(), list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
