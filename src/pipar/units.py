"""Rates, durations, sizes and addresses as people write them: "10Mbit/s", "20ms", "1GiB", "127.0.0.1:50051"."""

from __future__ import annotations

import math
import re
from decimal import ROUND_HALF_UP, Decimal

from pipar.errors import ConfigError, InputError

#: A higher rate is limited by the machines, not by the link.
LIMITLESS_BPS = 2e9

_RATES = {"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9}
_DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_SIZES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")


def _parse(text: str | float, units: dict[str, float], what: str, example: str) -> float:
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    # A value from a TOML file can have any type, despite the annotation.
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    folded = {unit.lower(): factor for unit, factor in units.items()}
    if match is not None and not match[2]:
        raise ConfigError(f"'{text}' has no unit; write a {what} like '{example}' (units: {', '.join(units)}).")
    if match is None or match[2].lower() not in folded:
        raise ConfigError(f"'{text}' is not a {what}; write it like '{example}' (units: {', '.join(units)}).")
    return float(match[1]) * folded[match[2].lower()]


def parse_rate(text: str | float) -> float:
    """Return bits per second; a plain number is already in bits per second."""
    return _parse(text, _RATES, "rate", "10Mbit/s")


def parse_duration(text: str | float) -> float:
    """Return seconds; a plain number is already in seconds."""
    return _parse(text, _DURATIONS, "duration", "20ms")


def parse_size(text: str | float) -> int:
    """Return bytes; a plain number is already in bytes."""
    return int(_parse(text, _SIZES, "size", "1GiB"))


def format_rate(bits_per_second: float | None) -> str:
    """Return a rate that `parse_rate` reads back; None is a link without a limit."""
    if bits_per_second is None:
        return "unlimited"
    text = f"{bits_per_second / 1e6:.10g}Mbit/s"
    return text if parse_rate(text) == bits_per_second else f"{bits_per_second!r}bit/s"


def format_mbits(bits_per_second: float | None, digits: int = 6) -> str:
    """Return a rate in Mbit/s without the unit, rounded to this number of digits; None means no limit."""
    if bits_per_second is None:
        return "unlimited"
    return f"{rounded(bits_per_second / 1e6, digits):.10g}"  # g alone would write 1234 in three digits as 1.23e+03


def rounded(value: float, digits: int) -> float:
    """Return a number rounded to this number of significant digits."""
    return float(f"{value:.{digits}g}")


def format_seconds(seconds: float, digits: int = 3) -> str:
    """Return seconds as messages have them, rounded to this number of digits: "25.1 s"."""
    return f"{rounded(seconds, digits):.10g} s"


def format_bytes(size_bytes: float) -> str:
    """Return a size such as '16.4 MB'."""
    for unit in ("B", "KB", "MB", "GB"):
        if size_bytes < 1000 or unit == "GB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    raise AssertionError


def format_percent(share: float, digits: int = 1) -> str:
    """Return a share in per cent, "59.3" for 0.5925; a half is rounded up, as browsers do.

    Python by itself rounds a half to the even digit.
    """
    if not math.isfinite(share):
        return str(share)
    return f"{Decimal(share * 100).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):f}"


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; an IPv6 host may be in brackets."""
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise InputError(
            f"'{address}' is not an address: write HOST:PORT with a port from 0 to 65535, as in 127.0.0.1:50051."
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
