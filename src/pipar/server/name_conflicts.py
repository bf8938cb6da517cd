"""Two devices with one credential, such as a copied memory card: one of them takes part, and both are told."""

from __future__ import annotations

from pipar.errors import TryAgainError

#: A device that has lost its state joins again while its former connection still seems alive. One that does so more
#: often than this, within this time, is more likely two devices that replace each other.
_MOST_REPLACED = 2
_WITHIN_S = 600.0


class NameConflicts:
    """Counts how often a connected device is replaced by another one with its credential."""

    def __init__(self) -> None:
        self._replaced_at: dict[str, list[float]] = {}  # by name; there are no more names than credentials

    def replace(self, name: str, now: float) -> None:
        """Count that a connected device is replaced, or raise TryAgainError if that happens too often."""
        recent = [at for at in self._replaced_at.get(name, ()) if now - at < _WITHIN_S]
        if len(recent) >= _MOST_REPLACED:
            raise TryAgainError(
                f"A device called '{name}' is connected, and has been replaced {len(recent)} times by another with its "
                "credential: two devices seem to share it. Give each its own, with 'pipar certs issue NAME'."
            )
        self._replaced_at[name] = [*recent, now]
