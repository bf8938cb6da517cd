"""What a network computes, as text to compare: its modules, their code, and the constants that the code reads.

Weights count by name, shape and dtype only: their values are not part of the computation.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipar.tensors.relu_outputs import HOOKS

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: Attributes that every module has: they are compared in other ways, or do not matter.
_EVERY_MODULE = frozenset(vars(nn.Module()))
#: Their version is part of what a cache depends on.
_LIBRARIES = ("torch", "numpy", "builtins")
#: Objects of these modules know of the whole process, such as all loggers, and change nothing that a network computes.
_OF_THE_PROCESS = ("logging", "threading")
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


def network_text(network: nn.Module) -> list[str]:
    """Return everything that a network's computation depends on, except the values of its weights.

    Modules come in their order, each with its path: which of them has an attribute or a hook is part of the text.
    """
    # An object without its own repr is printed with its address, which differs between processes.
    printed = re.sub(r"0x[0-9a-f]+", "", repr(network))
    code = _Code(network.buffers())
    for path, module in network.named_modules():
        try:
            code.add_module(path, module)
        except Exception:  # noqa: BLE001 - attributes may be anything; what uses this also looks at outputs
            code.lines.append(f"{path}: not all of it can be read")
    return [printed, *_tensors(network), *code.lines]


def function_text(function: Callable[..., Any]) -> list[str]:
    """Return everything that a user's own function computes by: its code, and what that reads."""
    code = _Code(())
    try:
        code.add_function(function)
    except Exception:  # noqa: BLE001 - attributes may be anything
        code.lines.append("not all of it can be read")
    return code.lines


def _tensors(network: nn.Module) -> Iterator[str]:
    """Yield the weights and buffers; each of several names of one tensor comes with the first of them."""
    first: dict[int, str] = {}
    parameters = network.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *network.named_buffers(remove_duplicate=False)):
        same = first.setdefault(id(tensor), name)
        yield f"{name} is {same}: {tensor.dtype} {list(tensor.shape)} {tensor.requires_grad}"


class _Code:
    """Collects the code of functions, and of what they use that is not from a library; what was seen gets its number.

    The order of the lines says to which module or function each of them belongs.
    """

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self.lines: list[str] = []
        self._buffers = {id(buffer) for buffer in buffers}
        self._seen: dict[int, int] = {}
        self._files: set[str] = set()
        self._kept: list[object] = []  # so that no identity is used twice

    def add_module(self, path: str, module: nn.Module) -> None:
        """Add the classes of a module, its plain attributes and its hooks."""
        self.lines.append(f"{path}: {type(module).__qualname__}")
        for kind in type(module).__mro__:
            self._add(kind)
        for name, value in vars(module).items():
            if name in HOOKS:
                self._add_all_values(f"{path}.{name}", value.values())
            elif name not in _EVERY_MODULE:
                self._add_value(f"{path}.{name}", value)

    def _add_all(self, values: Iterable[object]) -> None:
        for value in values:
            self._add(value)

    def add_function(self, function: Callable[..., Any]) -> None:
        """Add a function, or an object that can be called."""
        is_function = isinstance(function, type | types.FunctionType | types.MethodType | partial)
        (self._add_value if is_function else self._add_object)("function", function)

    def _add(self, value: object) -> None:
        """Add the code of a function or class; anything else has none."""
        if _is_of_library(value) or self._was_seen(value):
            return
        match value:
            case type():
                self._add_class(value)
            case types.FunctionType():
                self._add_function(value)
            case types.MethodType() | staticmethod() | classmethod():
                self._add(value.__func__)
            case property():
                self._add_all((value.fget, value.fset))
            case partial():
                self.lines.append(f"{getattr(value.func, '__qualname__', '')} with {list(value.keywords)}")
                self._add(value.func)
                self._add_all_values("partial", (*value.args, *value.keywords.values()))

    def _was_seen(self, value: object) -> bool:
        """Return True for the same object again, and add its number; otherwise remember it."""
        if number := self._seen.get(id(value)):
            self.lines.append(f"number {number} again")
            return True
        self._kept.append(value)
        self._seen[id(value)] = len(self._kept)
        return False

    def _add_class(self, kind: type) -> None:
        self.lines.append(kind.__qualname__)
        self._add_file(kind)
        is_installed = _is_of_package(kind)
        for name, value in vars(kind).items():
            if is_installed:
                self._add(value)  # its methods may be the user's own; all else is in its file, or of the process
            elif not (name.startswith("__") and isinstance(value, (*_PLAIN, tuple, dict))):
                self._add_value(f"{kind.__qualname__}.{name}", value)

    def _add_function(self, function: types.FunctionType) -> None:
        self._add_file(function)
        self._add_all_values(function.__qualname__, function.__defaults__ or ())
        self._add_all_values(function.__qualname__, (function.__kwdefaults__ or {}).values())
        for cell in function.__closure__ or ():
            if cell != types.CellType():  # of a name that has no value yet
                self._add_value(function.__qualname__, cell.cell_contents)
        is_installed = _is_installed(function)
        for name in sorted(self._add_code(function.__code__)):
            value = function.__globals__.get(name)
            # What a package uses is in its files and in those that it needs, which have versions. It may also depend
            # on the process, as the number of a session does, or what was imported before.
            if name in function.__globals__ and not (is_installed and _is_of_package(value)):
                self._add_value(name, value)

    def _add_code(self, code: types.CodeType) -> set[str]:
        """Add the instructions of a function and of those inside it; return the names that they use."""
        constants = [_in_order(one) for one in code.co_consts if not isinstance(one, types.CodeType)]
        instructions = hashlib.sha256(code.co_code).hexdigest()
        self.lines.append(f"{code.co_qualname}: {instructions} {constants!r} {code.co_names} {code.co_varnames}")
        names = set(code.co_names)
        for one in code.co_consts:
            if isinstance(one, types.CodeType):
                names |= self._add_code(one)
        return names

    def _add_all_values(self, name: str, values: Iterable[object]) -> None:
        for number, value in enumerate(values):
            self._add_value(f"{name} {number}", value)

    def _add_value(self, name: str, value: object) -> None:
        """Add what code reads: a number or text, the code of a function, or the file of the user's own module."""
        if isinstance(value, _PLAIN):
            self.lines.append(f"{name} = {value!r}")
        elif isinstance(value, set | frozenset):
            self._add_all_values(name, sorted(value, key=repr))  # in the same order in every process
        elif isinstance(value, tuple | list):
            self._add_all_values(name, value)
        elif isinstance(value, dict):
            # Not by its own methods: they may import modules, as in transformers, and fail.
            self._add_all_values(name, [*dict.keys(value), *dict.values(value)])
        elif isinstance(value, types.ModuleType):
            if not _is_of_library(value):
                self._add_file(value)
        elif isinstance(value, nn.Parameter) or id(value) in self._buffers:
            return  # its values are not part of the computation
        elif isinstance(value, Tensor):
            data = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
            shape = f"{value.dtype} {list(value.shape)}"
            self.lines.append(f"{name} = {shape} {hashlib.sha256(data).hexdigest()}")
        elif isinstance(value, type | nn.Module) or callable(value):
            self.lines.append(f"{name} is {getattr(value, '__qualname__', type(value).__qualname__)}")
            self._add(value)
        else:
            self._add_object(name, value)

    def _add_object(self, name: str, value: object) -> None:
        """Add the class and the attributes of an object, such as a configuration."""
        if _top(type(value).__module__) not in (*_LIBRARIES, *_OF_THE_PROCESS) and not self._was_seen(value):
            self._add(type(value))
            for key, one in getattr(value, "__dict__", {}).items():
                self._add_value(f"{name}.{key}", one)

    def _add_file(self, value: Any) -> None:
        """Add the file that defines something: what it uses may be next to it."""
        try:
            file = inspect.getsourcefile(value)
        except TypeError:  # typed at a prompt
            return
        if file is not None and file not in self._files and Path(file).is_file():
            self._files.add(file)
            self.lines.append(hashlib.sha256(Path(file).read_bytes()).hexdigest())


def _in_order(constant: object) -> object:
    """Return a constant whose text is the same in every process."""
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant


def _is_of_library(value: object) -> bool:
    """Return True for what comes with torch, numpy or Python, whose versions are part of what a cache depends on."""
    if isinstance(value, partial):
        return False
    name = str(value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None))
    return _top(name) in _LIBRARIES or _is_standard(name)


def _is_of_package(value: object) -> bool:
    """Return False for a function or class of the user's own, which may have been put into a package."""
    if isinstance(value, types.FunctionType):
        return _is_installed(value)
    if isinstance(value, types.MethodType | staticmethod | classmethod):
        return _is_of_package(value.__func__)
    if isinstance(value, type):
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        return file is not None and _holds_packages(Path(file).parent)
    return not isinstance(value, partial | nn.Module)


def _is_installed(function: types.FunctionType) -> bool:
    return _holds_packages(Path(function.__code__.co_filename).parent)


@cache
def _holds_packages(folder: Path) -> bool:
    """Return True for a folder of an installed package, also in a place of the user's choice (pip install --target)."""
    if not {"site-packages", "dist-packages"}.isdisjoint(folder.parts):
        return True
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return any(folder.glob("*.dist-info"))


def _top(name: str) -> str:
    return name.partition(".")[0]


@cache
def _is_standard(name: str) -> bool:
    """Return True for a module of Python's standard library, by its place: a user's module may have the same name."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return name in sys.builtin_module_names
    inside = Path(file).relative_to(_STANDARD_LIBRARY).parts if Path(file).is_relative_to(_STANDARD_LIBRARY) else ()
    return bool(inside) and inside[0] not in ("site-packages", "dist-packages")
