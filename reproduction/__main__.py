"""Runs `python -m reproduction`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from pipar.cli import exit_code
from reproduction.command import reproduce


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit with its code."""
    sys.exit(exit_code(reproduce, "python -m reproduction", sys.argv[1:] if args is None else args))


if __name__ == "__main__":
    main()
