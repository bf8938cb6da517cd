"""Certificates that expire soon are announced, so that a person can renew them in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pipar.errors import InputError

#: Long enough to renew the certificates of boards that are visited once a month.
SOON = timedelta(days=30)
_EVERY_S = 24 * 3600.0


def expiring(paths: Iterable[Path | None], now: datetime | None = None) -> list[str]:
    """Return a sentence for each certificate file that has expired or expires within a month.

    Files that are missing or hold no certificate are left out: they are reported where they are used.
    """
    from pipar.transport.certificates import expiry_of  # needs some time to import

    now = now or datetime.now(UTC)
    sentences = []
    for path in paths:
        try:
            end = None if path is None else expiry_of(path)
        except InputError:
            continue
        if end is not None and end <= now:
            sentences.append(f"The certificate in {path} expired on {end:%Y-%m-%d}: renew it with `pipar certs`.")
        elif end is not None and end <= now + SOON:
            days = (end - now).days
            left = f"in {days} day{'' if days == 1 else 's'}" if days else "within a day"
            when = f"expires on {end:%Y-%m-%d}, {left}"
            sentences.append(f"The certificate in {path} {when}: renew it with `pipar certs`.")
    return sentences


async def announce_expiry(paths: Iterable[Path | None], announce: Callable[[str], None]) -> None:
    """Announce certificates that expire soon, now and once a day."""
    paths = tuple(path for path in paths if path is not None)
    while paths:
        for sentence in expiring(paths):
            announce(sentence)
        await asyncio.sleep(_EVERY_S)
