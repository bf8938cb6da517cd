"""How torch runs in a process of ours: on how many threads, and with whose memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# From glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENAS = -1, -3, -8
_LARGEST = 2**31 - 1
_LARGE_MODEL_BYTES = 32_000_000


def keep_freed_memory() -> None:
    """Let this process reuse the memory of freed tensors instead of giving it back to the system.

    By default each large tensor is mapped anew and its pages are faulted in one by one: forwards and backwards of
    VGG-5 took 10 to 20 % more CPU time. Where the C library is not glibc, nothing is changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENAS, 1)
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, _LARGEST)


def release_freed_memory() -> None:
    """Let the system have all memory of freed tensors, this once: pieces of it were too small for what was asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_model_memory(size_bytes: int) -> None:
    """Let the system have freed memory if it is that of a large model; that of others costs less than it saves time."""
    if size_bytes >= _LARGE_MODEL_BYTES:
        release_freed_memory()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: the order of additions, and so the last bits, depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
