"""An accelerator that is none: the numbers of the CPU under the rules of an accelerator, so that breaking one raises.

Tensors of the CPU and of the accelerator do not mix. Copies are made, and results may be read or used by another
stream, only after the stream that they were submitted to has been synchronised. Single values can be read only where
that is allowed: elsewhere it would hold up the stream.

torch takes one such backend for a process, and keeps it: `in_child` runs a function in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from pipar.launch.child_processes import _PRELOAD
from support.waiting import PATIENCE_S

NAME = "standin"
MEMORY_BYTES = 2**30
_aten = torch.ops.aten
_POISON = {True: float("nan"), False: 99}  # what is read too early: not a number, or an unlikely integer


class RuleBrokenError(RuntimeError):
    """Something that an accelerator does not allow, or answers with wrong values."""


@dataclass(eq=False)
class Stream:
    """Work that is submitted and not yet known to be done: the host's memory that it writes."""

    device: Any = None
    pending: list[Callable[[], None]] = field(default_factory=list)
    submitted: int = 0
    done: int = 0

    def submit(self, work: Callable[[], None] | None = None) -> int:
        self.submitted += 1
        if work is not None:
            self.pending.append(work)
        return self.submitted

    def synchronize(self) -> None:
        for work in self.pending:
            work()
        self.pending.clear()
        self.done = self.submitted


class _Backend:
    """What torch.cuda is for an NVIDIA accelerator."""

    Stream = Stream

    def __init__(self) -> None:
        self.default = Stream()
        self.seeds: list[int] = []
        self._thread = threading.local()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_device_name(self, device: Any = None) -> str:  # noqa: ARG002
        return "Stand-In 1"

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:  # noqa: ARG002
        return MEMORY_BYTES, MEMORY_BYTES

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def manual_seed_all(self, seed: int) -> None:
        self.seeds.append(seed)

    def current_stream(self, device: Any = None) -> Stream:  # noqa: ARG002
        return getattr(self._thread, "stream", self.default)

    def set_stream(self, stream: Stream) -> None:
        self._thread.stream = stream


backend = _Backend()
#: How often a single value was read, which waits for the accelerator.
reads = 0
#: Rules that were broken where nothing can be raised.
broken: list[str] = []
_backward = threading.RLock()
_backward_stream: list[Stream] = []


class Placed(Tensor):
    """A tensor of the accelerator: its numbers, and the stream that wrote them last."""

    raw: Tensor
    stream: Stream  # that its memory returns to
    written: tuple[Stream, int]
    used: dict[Stream, int]  # by other streams

    @staticmethod
    def __new__(cls, raw: Tensor, stream: Stream | None = None) -> Placed:
        made: Placed = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            device=f"{NAME}:0",
        )  # fmt: skip
        made.raw, made.stream, made.used = raw, stream or current(), {}
        made.note(made.stream)
        weakref.finalize(made, _check_unused, made.stream, made.used)
        return made

    def use(self, stream: Stream) -> None:
        """Note that a stream reads or writes it; raise unless what others have written is done."""
        wrote, number = self.written
        if wrote is not stream and wrote.done < number:
            raise RuleBrokenError("A stream uses a tensor that another is still writing: it is not synchronised.")
        if stream is not self.stream:
            self.used[stream] = stream.submitted + 1

    def note(self, stream: Stream, work: Callable[[], None] | None = None) -> None:
        self.written = (stream, stream.submit(work))

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatched(func, args, kwargs or {})


def current() -> Stream:
    """Return the stream that work of this thread goes to; of autograd's own thread, that of the backward's caller."""
    if threading.current_thread() is not threading.main_thread() and isinstance(
        threading.current_thread(), threading._DummyThread
    ):
        return _backward_stream[-1] if _backward_stream else backend.default
    return backend.current_stream()


def _check_unused(_: Stream, used: dict[Stream, int]) -> None:
    """Note memory that is freed while another stream works with it: its own stream may give it away at once."""
    if any(stream.done < number for stream, number in used.items()):
        broken.append("Memory was freed while another stream was using it.")


def _dispatched(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    stream = current()
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    placed = [one for one in tensors if isinstance(one, Placed)]
    for one in placed:
        one.use(stream)
    if func is _aten.copy_.default:
        return _copied(*args, **kwargs, stream=stream)
    if func is _aten._to_copy.default:
        return _moved(args[0], stream, **kwargs)
    if func is _aten._local_scalar_dense.default:
        global reads
        reads += 1
        stream.synchronize()
    if func is _aten.empty_like.default and torch.device(kwargs.get("device") or NAME).type == "cpu":
        return torch.empty_like(args[0].raw)
    if any(one.ndim for one in tensors if not isinstance(one, Placed)):
        raise RuleBrokenError(f"{func} mixes tensors of the CPU and of the accelerator.")
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    known = {id(one.raw): one for one in placed}

    def wrapped(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        if id(one) in known:
            known[id(one)].note(stream)
            return known[id(one)]
        return Placed(one, stream)

    return tree_map(wrapped, func(*tree_map(_raw, args), **tree_map(_raw, kwargs)))


def _raw(one: Any) -> Any:
    return one.raw if isinstance(one, Placed) else one


def _copied(to: Tensor, of: Tensor, non_blocking: bool = False, *, stream: Stream) -> Tensor:
    if isinstance(to, Placed):
        to.raw.copy_(_raw(of))
        to.note(stream)
        return to
    values = _raw(of).clone()  # in the order of the stream: what is written later does not count
    if non_blocking:
        to.fill_(_POISON[to.is_floating_point()])
        stream.submit(lambda: _fill(to, values))
    else:
        stream.synchronize()
        to.copy_(values)
    return to


def _fill(to: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        to.data.copy_(values)


def _moved(of: Tensor, stream: Stream, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
    """Return a tensor in another dtype or on another device; from the CPU without waiting, it is read later."""
    kwargs.pop("pin_memory", None)
    to_host = device is not None and torch.device(device).type == "cpu"
    if to_host:
        stream.synchronize()
        return _aten._to_copy.default(_raw(of), **kwargs)
    result = Placed(_aten._to_copy.default(_raw(of), **kwargs), stream)
    if not isinstance(of, Placed) and non_blocking:
        result.note(stream, lambda: _check_unchanged(of, result.raw.clone()))
    return result


def _check_unchanged(host: Tensor, copied: Tensor) -> None:
    if host.dtype == copied.dtype and not torch.equal(host.nan_to_num(), copied.nan_to_num()):
        raise RuleBrokenError("Memory of the host was changed before its copy to the accelerator was done.")


_library: Any = None


def register() -> None:
    """Make the accelerator known to torch; for the rest of this process."""
    global _library
    _setup_privateuseone_for_python_backend(NAME, backend)
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("empty.memory_format", _empty, "PrivateUse1")
    _library.impl("empty_strided", _empty_strided, "PrivateUse1")
    torch.autograd.backward = _on_stream(torch.autograd.backward)


def _on_stream(backward: Callable[..., None]) -> Callable[..., None]:
    """Return a backward whose work goes to the stream of the thread that calls it."""

    def wrapped(*args: Any, **kwargs: Any) -> None:
        if len({one.device for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}) > 1:
            raise RuleBrokenError("A gradient is not where its tensor is.")
        with _backward:  # one at a time, so that autograd's own thread knows whose it is
            _backward_stream.append(backend.current_stream())
            try:
                backward(*args, **kwargs)
            finally:
                _backward_stream.pop()

    return wrapped


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return Placed(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return Placed(torch.empty_strided(size, stride, dtype=dtype))


# --- a process of its own


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Return what the function of a module returns in a new process that has the accelerator; raise what it raises."""
    multiprocessing.set_forkserver_preload(_PRELOAD)
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(function, args, sender))
    child.start()
    sender.close()
    try:
        if not receiver.poll(PATIENCE_S):
            raise AssertionError("The process with the accelerator gives no answer.")
        is_result, content = receiver.recv()
    finally:
        child.kill()
        child.join()
    if not is_result:
        raise content
    return content


def _run(function: Callable[..., Any], args: tuple[Any, ...], sender: Connection) -> None:
    """Send the result of the function, or its error, and end at once: torch's threads would not end by themselves."""
    torch.set_num_threads(1)
    register()
    try:
        sender.send((True, function(*args)))
    except BaseException as error:  # noqa: BLE001 - raised again in the other process
        error.add_note("".join(traceback.format_exception(error)))
        sender.send((False, error))
    finally:
        os._exit(0)
