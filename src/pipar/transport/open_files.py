"""How many connections a server may have: the sockets and the files of a process share one limit of the system.

A process that has reached it cannot save a checkpoint, write a log or accept a device. So a server raises its limit
when it starts, as far as the system allows, and keeps some of it for its own files.
"""

from __future__ import annotations

import resource

#: For checkpoints, results, logs, the live page, metrics and the processes that search for plans.
RESERVED_FILES = 256
#: Enough for the default number of connections.
WANTED_FILES = 8192


def raise_limit() -> int:
    """Raise this process's limit of open files to what a server wants, as far as it may; return the limit."""
    soft, hard = limits()
    wanted = min(max(soft, WANTED_FILES), hard)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return wanted


def limits() -> tuple[int, int]:
    """Return how many files this process may open, and how many it may ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _number(soft), _number(hard)


def most_connections(wanted: int, files: int) -> int:
    """Return how many connections leave enough of this limit for files: all but the reserve, or half if it is small."""
    return max(1, min(wanted, max(files - RESERVED_FILES, files // 2)))


def _number(limit: int) -> int:
    return 2**31 - 1 if limit == resource.RLIM_INFINITY else limit
