"""Certificates that expire soon are announced, so that a person can renew them in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pipar.errors import InputError
from pipar.private_files import read_bytes

#: Long enough to renew the certificates of boards that are visited once a month.
SOON = timedelta(days=30)
_EVERY_S = 24 * 3600.0


def expiring(certificates: Iterable[tuple[Path, bytes]], now: datetime | None = None) -> list[str]:
    """Return a sentence for each certificate, given as its file and its PEM, that has expired or does within a month.

    What is no certificate is left out: it is reported where it is used.
    """
    from pipar.transport.certificates import expiry_of  # needs some time to import

    now = now or datetime.now(UTC)
    sentences = []
    for path, pem in certificates:
        try:
            end = expiry_of(pem, path)
        except InputError:
            continue
        if end <= now:
            sentences.append(f"The certificate in {path} expired on {end:%Y-%m-%d}: renew it with `pipar certs`.")
        elif end <= now + SOON:
            days = (end - now).days
            left = f"in {days} day{'' if days == 1 else 's'}" if days else "within a day"
            when = f"expires on {end:%Y-%m-%d}, {left}"
            sentences.append(f"The certificate in {path} {when}: renew it with `pipar certs`.")
    return sentences


def expiring_files(paths: Iterable[Path | None], now: datetime | None = None) -> list[str]:
    """Return a sentence for each file whose certificate has expired or does within a month; files may be missing."""
    found = []
    for path in paths:
        try:
            if path is not None:
                found.append((path, read_bytes(path, "a certificate")))
        except InputError:
            continue
    return expiring(found, now)


async def announce_expiry(sentences: Callable[[], Sequence[str]], announce: Callable[[str], None]) -> None:
    """Announce what is found, now and once a day, until it is cancelled."""
    while True:
        for sentence in sentences():
            announce(sentence)
        await asyncio.sleep(_EVERY_S)
