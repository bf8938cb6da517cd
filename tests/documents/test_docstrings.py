"""The examples in the docstrings of public names, run as written."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pipar
from pipar.errors import PiparError
from pipar.settings.config import Config

#: As the page of the reference says.
SMALL = ["run.epochs=2", "server.profile=i7-11850h", "devices.profile=raspberry-pi-5"]


def public() -> Iterator[tuple[str, Any]]:
    """Yield the public names, and the methods of public classes, that a user calls."""
    for name in pipar.__all__:
        thing = getattr(pipar, name)
        thing = thing if inspect.isroutine(thing) or inspect.isclass(thing) else type(thing)
        yield name, thing
        if thing in (Config, PiparError):  # have pages of their own
            continue
        for member, value in vars(thing).items() if inspect.isclass(thing) else ():
            if inspect.isfunction(value) and not member.startswith("_"):
                yield f"{name}.{member}", value


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("name", "thing"), list(public()), ids=[name for name, _ in public()])
def test_the_example_of_a_public_name_gives_what_it_shows(
    name: str, thing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    known = {"pipar": pipar, "torch": torch, "SMALL": SMALL}
    known["model"] = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    known["datasets"] = [TensorDataset(torch.randn(20, 8), torch.arange(20) % 3) for _ in range(2)]
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, name, module=False, globs=known)
    assert test.examples, f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    written: list[str] = []
    runner.run(test, out=written.append)
    assert runner.failures == 0, "".join(written)
