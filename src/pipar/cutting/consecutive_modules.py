"""A network whose modules run one after another, cut after modules that the user names.

The stages are the user's own modules, so nothing has to be recorded, and a module may do what no recording can follow.
It is sound only if a forward is nothing else than these modules, each called with the output of the one before it. That
is watched during a forward: any operation on a tensor outside of the modules rules it out, also one that only reads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipar.cutting.recorded_graph import memory_of
from pipar.errors import ModelError, did_you_mean
from pipar.tensors.inputs import Inputs, drawn_like


class NoChainError(Exception):
    """A network does not run its modules one after another; the message is why."""


def check_names(network: nn.Module, names: Sequence[str]) -> None:
    """Raise ModelError if a cut point names no module of the network, or one is named twice."""
    known = [path for path, _ in network.named_modules(remove_duplicate=False) if path]
    for number, name in enumerate(names):
        if name not in known:
            some = ", ".join(path for path in known if "." not in path)
            raise ModelError(
                f"model.cut_points names '{name}', which is not a module of {type(network).__name__}"
                f"{did_you_mean(name, known)}: it has {some}, and modules inside of them."
            )
        if name in names[:number]:
            raise ModelError(f"model.cut_points names '{name}' twice: name each module once.")


def places_after(names: Sequence[str], modules: Sequence[str]) -> list[int]:
    """Return the place of the last call inside each named module; `modules` are those of all calls, in their order.

    Raise ModelError if one is not called, nothing is called after it, or names are not in order of execution.
    """
    places = {name: _last_inside(modules, name) for name in names}
    for name, place in places.items():
        if place is None:
            raise ModelError(
                f"model.cut_points names '{name}', but a forward computes nothing in it: name the module before it."
            )
    ordered = sorted(names, key=lambda name: places[name] or 0)
    if ordered != list(names):
        raise ModelError(f"model.cut_points = {_listed(names)} is not in order of execution: write {_listed(ordered)}.")
    found = [place for place in places.values() if place is not None]
    for (name, place), later in zip(places.items(), [*found[1:], len(modules) - 1], strict=True):
        if place == later:
            what = "the network" if place == len(modules) - 1 else "the next one in model.cut_points"
            raise ModelError(
                f"the network cannot be cut after '{name}', because {what} also ends there: leave '{name}' out. P = Q, "
                "without a cut, is always possible."
            )
    return found


def chained_stages(network: nn.Module, names: Sequence[str], example: Inputs) -> dict[str, nn.Sequential]:
    """Return a stage up to each named module, and one for the rest; raise NoChainError if they do not chain.

    `example` is a batch of two inputs. Raise ModelError if the names do not fit what a forward calls.
    """
    calls = _calls(network, _units(network, names), example)
    ends = [place + 1 for place in places_after(names, calls)]
    groups = [calls[start:end] for start, end in zip([0, *ends], [*ends, len(calls)], strict=True)]
    _refuse_sharing(network, groups, names)
    rest = "output" if "output" not in names else "the rest"
    return {
        name: nn.Sequential(*(network.get_submodule(path) for path in group))
        for name, group in zip([*names, rest], groups, strict=True)
    }


def _last_inside(modules: Sequence[str], name: str) -> int | None:
    inside = (place for place in range(len(modules) - 1, -1, -1) if is_inside(modules[place], name))
    return next(inside, None)


def is_inside(path: str, module: str) -> bool:
    """Return True for the path of a module itself, or of one inside it."""
    return path == module or path.startswith(f"{module}.")


def _listed(names: Sequence[str]) -> str:
    return f"[{', '.join(map(repr, names))}]"


def _units(network: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return the largest modules that have no named module inside them, by their paths."""

    def is_divided(path: str) -> bool:
        return not path or any(name.startswith(f"{path}.") for name in names)

    return {
        path: module
        for path, module in network.named_modules()
        if not is_divided(path) and is_divided(path.rpartition(".")[0])
    }


class _Forward(TorchFunctionMode):
    """Watches a forward: the modules that it calls, and operations on tensors outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
        self.outside: list[tuple[int, str]] = []  # after that many calls, this operation
        self._depth = 0

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._depth == 0:
            self.outside.append((len(self.calls), str(getattr(func, "__name__", func))))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self, units: dict[str, nn.Module]) -> Iterator[None]:
        hooks: list[Any] = []
        for path, module in units.items():
            hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._leave(path), with_kwargs=True))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, path: str) -> Any:
        def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._depth -= 1
            if self._depth == 0:
                self.calls.append((path, args, kwargs, output))

        return leave


def _calls(network: nn.Module, units: dict[str, nn.Module], example: Inputs) -> list[str]:
    """Return the units that a forward of a copy in train mode calls, in their order."""
    if not isinstance(example, Tensor):
        raise NoChainError("its input is not one tensor")
    forward, copied = _Forward(), copy.deepcopy(network).train()
    inputs = drawn_like(example, 2, seed=0).to(example.dtype)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        with forward.watching({path: copied.get_submodule(path) for path in units}):
            output = copied(inputs)
    _check_chain(forward, inputs, output)
    return [path for path, *_ in forward.calls]


def _check_chain(forward: _Forward, inputs: Tensor, output: object) -> None:
    """Raise NoChainError unless each call gets only what the one before it returned."""
    if forward.outside:
        number, operation = forward.outside[0]
        after = f"after {forward.calls[number - 1][0]}" if number else "before its first module"
        raise NoChainError(f"{operation} is computed {after}, outside of its modules")
    current: object = inputs
    for path, args, kwargs, result in forward.calls:
        if kwargs or len(args) != 1 or args[0] is not current:
            raise NoChainError(f"{path} is not called with the output of the module before it alone")
        if not isinstance(result, Tensor):
            raise NoChainError(f"{path} returns a {type(result).__name__}, not one tensor")
        current = result
    if output is not current:
        raise NoChainError("its output is not that of its last module")


def _refuse_sharing(network: nn.Module, groups: Sequence[Sequence[str]], names: Sequence[str]) -> None:
    """Raise ModelError if a weight or buffer is used on both sides of a cut."""
    seen: dict[object, int] = {}
    for number, group in enumerate(groups):
        for path in group:
            unit = network.get_submodule(path)
            for name, tensor in (*unit.named_parameters(path), *unit.named_buffers(path)):
                if (before := seen.setdefault(memory_of(tensor), number)) != number:
                    raise ModelError(
                        f"the network cannot be cut after '{names[before]}', because {name} is used on both sides: "
                        "name modules before or after all uses of it."
                    )
