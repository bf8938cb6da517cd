"""What torch computes on: where tensors are, the stream of a lane, when its work is done, and its memory.

Everything else asks this module. On the CPU, each function returns what it was given. On an accelerator work is only
submitted: results may be read, and the memory of inputs reused, once the stream of the thread that submitted it has
been synchronised. That is what the end of every stage does.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pipar.errors import ConfigError
from pipar.units import format_bytes

#: Accelerators whose copies run beside the CPU if its side of them is pinned memory.
_PINS = ("cuda", "xpu")
#: Accelerators that cannot compute in float64.
_WITHOUT_FLOAT64 = ("mps",)
_CPU = "cpu"


@dataclass(frozen=True)
class TorchDevice:
    """A device of torch, and whether networks compute in bfloat16 on it where torch considers that safe."""

    name: str = _CPU
    autocast: bool = False

    @cached_property
    def device(self) -> torch.device:
        return torch.device(self.name)

    @property
    def is_cpu(self) -> bool:
        return self.device.type == _CPU

    @property
    def _backend(self) -> Any:
        """The module of torch for this kind of accelerator, such as torch.cuda."""
        return torch.get_device_module(self.device)

    # --- tensors

    def put(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the CPU on this device, as a leaf that requires a gradient if the tensor does."""
        if self.is_cpu:
            return tensor
        staged = _staging(tensor, self.device).copy_(tensor.detach())
        # Pinned memory is reused only after the copy: torch notes the stream.
        return staged.to(self.device, non_blocking=True).requires_grad_(tensor.requires_grad)

    def put_all(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the CPU on this device, by name."""
        return {name: self.put(tensor) for name, tensor in state.items()}

    def place(self, module: nn.Module, placed: Mapping[int, Tensor] | None = None) -> Any:
        """Return the module itself on the CPU, else a copy of it on this device; tied weights stay tied.

        `placed` are the tensors that are there already, by the identity of those of the module.
        """
        if self.is_cpu:
            return module
        memo: dict[int, Any] = dict(placed or {})
        for weight in module.parameters():
            if id(weight) not in memo:
                memo[id(weight)] = nn.Parameter(self.put(weight.detach()), requires_grad=weight.requires_grad)
        for buffer in module.buffers():
            memo[id(buffer)] = self.put(buffer.detach())
        self.end_stage()
        return copy.deepcopy(module, memo)

    def computing(self) -> AbstractContextManager[Any]:
        """Return the context in which forwards and losses are computed."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()

    def seed(self, number: int) -> None:
        """Seed the random numbers that an accelerator draws itself, as for dropout."""
        if not self.is_cpu:
            self._backend.manual_seed(number)

    def widened(self, output: Any) -> Any:
        """Return one or several tensors as they cross a cut: in float32 what autocast has computed in 16 bits."""
        if not self.autocast:
            return output
        if isinstance(output, tuple):
            return tuple(map(self.widened, output))
        return output.float() if output.dtype == torch.bfloat16 else output

    # --- lanes

    @property
    def accelerator(self) -> TorchDevice | None:
        """What lanes have to wait for at the end of a stage; None for the CPU."""
        return None if self.is_cpu else self

    def begin_lane(self) -> None:
        """Give the calling thread a stream of its own."""
        if not self.is_cpu and hasattr(self._backend, "Stream"):
            self._backend.set_stream(self._backend.Stream(self.device))

    def end_stage(self) -> None:
        """Return when everything is done that the calling thread has submitted."""
        _synchronize(self.device)

    @property
    def clock(self) -> Callable[[], float]:
        """Return the clock that measures work: CPU time or, of an accelerator, when its work is done."""
        return time.thread_time if self.is_cpu else self._now

    def _now(self) -> float:
        self.end_stage()
        return time.perf_counter()

    # --- facts

    @cached_property
    def hardware(self) -> str:
        """What computes, as in "NVIDIA A100"; empty for the CPU."""
        if self.is_cpu:
            return ""
        name = getattr(self._backend, "get_device_name", None)
        return str(name(self.device)) if name is not None else self.device.type

    @property
    def memory_bytes(self) -> int | None:
        """The memory of an accelerator; None for the CPU, and where torch does not know it."""
        if self.is_cpu:
            return None
        if (info := getattr(self._backend, "mem_get_info", None)) is not None:
            return int(info(self.device)[1])
        recommended = getattr(self._backend, "recommended_max_memory", None)
        return None if recommended is None else int(recommended())

    def check_dtype(self, dtype: str, what: str) -> None:
        """Raise ConfigError if this device cannot compute in a dtype; `what` is the key that chose the device."""
        if dtype == "float64" and self.device.type in _WITHOUT_FLOAT64:
            raise ConfigError(
                f"{what} = '{self.name}' cannot compute in float64, which model.dtype asks for: write "
                "model.dtype = 'float32', or another torch_device."
            )

    def __str__(self) -> str:
        if self.is_cpu:
            return _CPU
        memory = self.memory_bytes
        return f"{self.name} ({self.hardware}{'' if memory is None else ', ' + format_bytes(memory)})"


CPU = TorchDevice()


def find_torch_device(name: str, what: str, *, autocast: bool = False) -> TorchDevice:
    """Return the device of this name, "auto" being an accelerator if there is one; raise ConfigError if it is not here.

    `what` is the key that has the name.
    """
    if name == _CPU:
        return TorchDevice(_CPU, autocast)
    present = accelerators()
    if name == "auto":
        return TorchDevice(present[0] if present else _CPU, autocast)
    kind, _, number = name.partition(":")
    known = {_CPU, *present, *(one.partition(":")[0] for one in present)}
    if name in known or (kind in known and number == "0"):
        return TorchDevice(name, autocast)
    here = f"this machine has {', '.join(present)}" if present else "torch finds no accelerator on this machine"
    raise ConfigError(
        f"{what} = '{name}', but {here}: write {', '.join(map(repr, ('auto', _CPU, *present)))}, or install the torch "
        "that supports it ('pipar doctor' shows what torch finds)."
    )


def accelerators() -> list[str]:
    """Return the names of this machine's accelerators, as in ["cuda:0", "cuda:1"]."""
    known = getattr(torch, "accelerator", None)  # torch has it from 2.6 on
    found = known.current_accelerator() if known is not None and known.is_available() else None
    if known is None or found is None:
        return []
    count = known.device_count()
    return [found.type] if count == 1 else [f"{found.type}:{number}" for number in range(count)]


# --- tensors of any device


def to_host(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph on the CPU; one that is there already shares its memory."""
    if tensor.is_cpu:
        return tensor.detach()
    copied = _copied(tensor)
    _synchronize(tensor.device)
    return copied


def all_to_host(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without their graphs on the CPU, by name."""
    copied = {name: one.detach() if one.is_cpu else _copied(one) for name, one in state.items()}
    wait_for(state.values())
    return copied


def _copied(tensor: Tensor) -> Tensor:
    """Return where a tensor is being copied to on the CPU; it may be read after its device is synchronised."""
    return _staging(tensor, tensor.device).copy_(tensor.detach(), non_blocking=True)


def wait_for(tensors: Iterable[Tensor]) -> None:
    """Return when everything is done that this thread has submitted to the devices of the tensors."""
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        _synchronize(device)


def numbers(tensors: Iterable[Tensor]) -> list[float]:
    """Return the values of tensors with one number each; those of an accelerator come in one copy."""
    given = list(tensors)
    if all(tensor.is_cpu for tensor in given):
        return [tensor.item() for tensor in given]
    return [float(one) for one in to_host(torch.stack([tensor.detach().reshape(()) for tensor in given])).tolist()]


def _staging(tensor: Tensor, device: torch.device) -> Tensor:
    """Return memory of the CPU for a copy to or from an accelerator."""
    return torch.empty_like(tensor, device=_CPU, pin_memory=device.type in _PINS, requires_grad=False)


def _synchronize(device: torch.device) -> None:
    if device.type == _CPU:
        return
    backend: Any = torch.get_device_module(device)
    if hasattr(backend, "current_stream"):
        backend.current_stream(device).synchronize()
    else:
        backend.synchronize()
