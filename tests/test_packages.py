"""The packages import each other as docs/packages.toml allows, without a cycle, and the documents say the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S

from docs import shape

ALL = shape.modules()


def test_every_module_imports_only_what_its_package_may() -> None:
    assert [breach for module, source in ALL.items() for breach in shape.breaches(module, source, ALL)] == []


def test_no_modules_import_each_other_in_a_cycle() -> None:
    assert shape.cycles(shape.graph(ALL)) == []


def test_the_rules_themselves_have_no_cycle() -> None:
    rules = {name: rule["imports"] for name, rule in shape.RULES["packages"].items()}
    assert shape.cycles(rules) == []


def test_every_package_of_the_rules_exists_and_has_a_map_of_its_modules() -> None:
    packages = {shape.package_of(module) for module in ALL} - {shape.ROOT_PACKAGE}
    assert packages == set(shape.RULES["packages"])
    for package in packages:
        text = ALL[f"{package}.__init__"]
        own = [module.partition(".")[2] for module in ALL if shape.package_of(module) == package]
        assert [name for name in own if name != "__init__" and f"`{name}`" not in text] == [], package


@pytest.mark.parametrize("package", ["reproduction", "simulation"])
def test_a_package_next_to_pipar_has_a_map_of_its_modules(package: str) -> None:
    folder = shape.ROOT / package
    text = (folder / "__init__.py").read_text("utf-8")
    assert [path.stem for path in folder.glob("*.py") if path.stem != "__init__" and f"`{path.stem}`" not in text] == []


def test_packages_are_at_most_two_levels_deep() -> None:
    assert [module for module in ALL if module.count(".") > 1] == []


MADE_UP = {
    (
        "execution.stage_graph",
        "from pipar.server.program import Server",
    ): "execution.stage_graph imports server.program, which",
    ("execution.stage_graph", "import pipar.server.program"): "execution.stage_graph imports server.program, which",
    (
        "execution.stage_graph",
        "from pipar.server import program",
    ): "execution.stage_graph imports server.program, which",
    ("nn.parts", "import pipar"): "nn.parts imports __init__, which",
    (
        "planner.search",
        "def f():\n    from pipar.launch.virtual import x",
    ): "planner.search imports launch.virtual, which",
    ("units", "if TYPE_CHECKING:\n    from pipar.job.job import Job"): "units imports job.job, which",
    ("nn.parts", "from pipar.transport.channel import Channel"): "nn.parts imports transport.channel, which",
    ("nn.parts", "from pipar.transport import channel"): "nn.parts imports transport.channel, which",
    ("device.program", "from pipar.server.program import Server"): "device.program imports server.program, which",
    ("server.program", "import pipar.device.program"): "server.program imports device.program, which",
    ("planner.costs", "import torch"): "planner.costs imports torch",
    ("profiling.profile", "import torch"): "profiling.profile imports torch",
    ("wire.frames", "def f():\n    from torch import nn"): "wire.frames imports torch",
    ("launch.processes", "from grpc import aio"): "launch.processes imports grpc",
    ("launch.processes", "import uvicorn"): "launch.processes imports uvicorn",
    ("wire.frames", "if not TYPE_CHECKING:\n    import torch"): "wire.frames imports torch",
    ("planner.costs", "import importlib\nimportlib.import_module(name)"): "planner.costs imports import_module",
    ("planner.costs", "__import__('torch')"): "planner.costs imports import_module",
    ("planner.costs", "from reproduction.cells import Cell"): "planner.costs imports reproduction",
    ("launch.run", "import simulation"): "launch.run imports simulation",
    ("transport.helpers", ""): "transport.helpers has a name that says nothing",
    ("attic.box", ""): "attic.box is in a package that docs/packages.toml does not name",
}


@pytest.mark.parametrize(("made_up", "sentence"), MADE_UP.items(), ids=lambda value: str(value)[:60])
def test_a_made_up_breach_is_found(made_up: tuple[str, str], sentence: str) -> None:
    module, source = made_up
    assert any(found.startswith(sentence) for found in shape.breaches(module, source, ALL))


def test_a_made_up_cycle_is_found() -> None:
    assert shape.cycles({"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": []}) == [["a", "b", "c"]]


def test_a_circle_through_a_package_itself_is_found() -> None:
    made_up = {"report.__init__": "from pipar.report.page import page", "report.page": "from pipar.report import write"}
    assert shape.cycles(shape.graph(made_up)) == [["report.__init__", "report.page"]]


def test_torch_does_not_come_with_a_module_that_does_without_it() -> None:
    assert {module: path for module, path in shape.without_torch(ALL).items() if path} == {}


@pytest.mark.parametrize("module", ["planner.costs", "profiling.profile"])
def test_torch_that_comes_with_another_module_is_found(module: str) -> None:
    made_up = {**ALL, module: "from pipar.profiling.measure import measure"}
    assert shape.without_torch(made_up)[module] == [module, "profiling.measure"]
    late = {**ALL, module: "def f():\n    from pipar.profiling.measure import measure"}
    assert shape.without_torch(late)[module] == []


def test_a_type_only_import_of_torch_is_allowed() -> None:
    assert shape.breaches("planner.costs", "if TYPE_CHECKING:\n    import torch", ALL) == []


def test_the_architecture_page_has_the_table_of_the_rules() -> None:
    text = shape.ARCHITECTURE.read_text("utf-8")
    assert shape.table() in text, "run python -m docs.shape --write"


TIMING_ONLY = """
import sys
import pipar
for method in ("pipar", "sfl2"):
    pipar.run(
        {"data": {"name": "cifar10", "samples_per_device": 20}, "server": {"profile": "i7-11850h"},
         "devices": [{"count": 2, "profile": "raspberry-pi-3b"}], "run": {"epochs": 1, "method": method}},
        world="timing-only",
    )
print([name for name in ("torch", "grpc") if name in sys.modules])
"""


@pytest.mark.slow
def test_a_timing_only_run_imports_neither_torch_nor_grpc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path))
    command = [sys.executable, "-c", TIMING_ONLY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


#: Of packages that may import these libraries, modules that start without them.
LIGHT = ("cli", "live_page.serve", "job.prepare", "launch.virtual", "transport.in_memory", "transport.channel")


IMPORT_EACH = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    print(module, [name for name in ("torch", "grpc", "uvicorn") if name in sys.modules])
"""


@pytest.mark.slow
def test_importing_does_not_import_torch_grpc_or_uvicorn() -> None:
    modules = ["pipar", *(f"pipar.{name}" for name in (*LIGHT, "planner.search", "planner.search_worker"))]
    command = [sys.executable, "-c", IMPORT_EACH, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.stdout.splitlines(), done.stderr) == ([f"{module} []" for module in modules], "")


@pytest.mark.slow
def test_importing_pipar_imports_none_of_its_packages_until_a_name_is_used() -> None:
    code = """
import pipar, sys
def packages():
    names = [name.split(".") for name in sys.modules if name.startswith("pipar.")]
    return sorted({name[1] for name in names if len(name) > 2})
print(packages(), set(pipar.__all__) <= set(dir(pipar)))
pipar.Config
print(packages())
print([name for name in pipar.__all__ if getattr(pipar, name) is None])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.stdout.splitlines(), done.stderr) == (["[] True", "['settings']", "[]"], "")


@pytest.mark.slow
def test_the_shape_is_printed() -> None:
    text = "\n".join(shape.report())
    for what in ("modules at the root", "lines a module", "lines a function", "constructor parameters", "cycles"):
        assert what in text


@pytest.mark.slow
def test_the_architecture_page_has_the_current_walks() -> None:
    # In a new process: functions with results in a cache of another test are not called again, and would be missing.
    command = [sys.executable, "-m", "docs.walks"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, cwd=shape.ROOT)
    traced = [line.partition(" passes ")[2] for line in done.stdout.splitlines() if line]
    text = shape.ARCHITECTURE.read_text("utf-8")
    assert len(traced) == 2
    assert [walk for walk in traced if f"\n{walk}\n" not in text] == [], "run python -m docs.walks --write"
