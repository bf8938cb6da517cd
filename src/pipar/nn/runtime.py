"""How torch uses the threads and the memory of this process."""

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
    """Let this process reuse the memory of freed tensors instead of returning it to the system.

    By default each large tensor is mapped separately and its pages are faulted in one by one: forwards and backwards of
    VGG-5 took 10 to 20 % more CPU time. Without glibc, this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENAS, 1)
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, _LARGEST)


def release_freed_memory() -> None:
    """Return all freed memory to the system once: its fragments may be too small for the next large tensors."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_model_memory(size_bytes: int) -> None:
    """Return freed memory to the system after a large model; for a small one the time is worth more than the memory."""
    if size_bytes >= _LARGE_MODEL_BYTES:
        release_freed_memory()


def compute_with(threads: int) -> None:
    """Let torch use this many threads for what the calling thread computes; others keep their number."""
    torch.get_num_threads()  # a thread's first use of torch sets its number to the latest one of the process
    torch.set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: the order of additions, and so the last bits, depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
