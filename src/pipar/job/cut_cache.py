"""The cuts of networks on disk, so that a network is recorded and checked once and not at every start."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipar import cutting, tensors
from pipar.cutting.saved_stages import line_from_data, line_to_data
from pipar.cutting.stage_line import Line
from pipar.job.network_code import network_text
from pipar.profiling.cache import find_text, keep_text
from pipar.tensors.inputs import InputForm

_KIND = "cuts"


def kept_line(
    network: nn.Module, form: InputForm, dtype: torch.dtype, names: Sequence[str] | None, make: Callable[[], Line]
) -> Line:
    """Return the network as a line of stages, cut after the named modules or everywhere: kept, or made and then kept.

    A kept one was checked when it was made; whether it still computes what the network does is checked here.
    """
    key = _key(network, form, dtype, names)
    line = _found(key, network, form, dtype)
    if line is None:
        line = make()
        data = line_to_data(line)
        if data is not None:
            keep_text(key, json.dumps(data), _KIND)
    return line


def _found(key: dict[str, object], network: nn.Module, form: InputForm, dtype: torch.dtype) -> Line | None:
    text = find_text(key, _KIND)
    if text is None:
        return None
    try:
        data: Any = json.loads(text)
    except ValueError:
        return None
    return line_from_data(data, network, form.example(2, dtype))


def _key(network: nn.Module, form: InputForm, dtype: torch.dtype, names: Sequence[str] | None) -> dict[str, object]:
    """Return everything that the stages of a network depend on."""
    return {
        "network": hashlib.sha256(json.dumps(network_text(network)).encode()).hexdigest(),
        "form": repr(form),
        "dtype": str(dtype),
        "cut_points": None if names is None else list(names),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "pipar": _own_code(),
    }


@cache
def _own_code() -> str:
    """Return the code that records and cuts networks: another version of it may cut elsewhere."""
    folders = [Path(folder) for package in (cutting, tensors) for folder in package.__path__]
    files = sorted(file for folder in folders for file in folder.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
