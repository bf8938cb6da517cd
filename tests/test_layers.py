"""Imports point up the layers: a module imports only from its own line or from lines above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "pipar"

# From top to bottom; "planner.*" is every module of the folder that no line names.
LINES = [
    line.split()
    for line in """
    errors units addresses clock keyed factory records events
    backoff logs monitor
    coding.*
    stages schedule methods aggregation config wording
    planner.*
    protocol.*
    trace gauges pace
    checkpoint
    privacy.__init__ privacy.accounting privacy.mechanisms privacy.spending
    trackers.*
    nn.*
    data.*
    privacy.*
    link.* privacy.memory
    stage_times cutoff forecast judge busy
    compute lifeline device server turns ledger hollow job results session silence reception replanning foresight \
    choosing validation keeper
    enrolment assemble torchside workload attacking planning prepare virtual processes explain doctor
    report.*
    run deployment faults.*
    __init__
    reproduce.*
    display tables chart plan_view dashboard.* cli.* __main__
    """.strip().splitlines()
]

#: Modules that need no torch, so that planning and timing-only runs start at once.
WITHOUT_TORCH = {
    "planner.*", "protocol.*", "trace", "stages", "schedule", "methods", "aggregation", "config", "checkpoint",
    "coding.*", "privacy.accounting", "privacy.mechanisms", "privacy.spending",
}  # fmt: skip
FORBIDDEN_NAMES = {"utils", "common", "helpers", "manager"}


@dataclass(frozen=True)
class Import:
    """`target` is imported; what only a type checker sees does not run."""

    target: str
    runs: bool


def modules() -> dict[str, str]:
    """The source of every module by its name below pipar; `planner.__init__` is a folder's own."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts): path.read_text("utf-8")
        for path in sorted(SOURCE.rglob("*.py"))
    }


def imports(source: str) -> Iterator[Import]:
    """Every import of a source, inside functions, too; `from a import b` counts as a and as a.b."""
    tree = ast.parse(source)
    checked = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for part in node.body
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, id(node) not in checked) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides where it points"
            if node.module != "pipar":  # `from pipar import keyed` takes nothing of the root itself
                yield Import(node.module or "", id(node) not in checked)
            yield from (Import(f"{node.module}.{alias.name}", id(node) not in checked) for alias in node.names)


def matches(module: str, pattern: str) -> bool:
    folder = pattern.removesuffix(".*")
    return module.startswith(f"{folder}.") if folder != pattern else module == pattern


def lines_of(module: str) -> list[int]:
    named = [number for number, line in enumerate(LINES) if module in line]  # apart from the rest of its folder
    return named or [number for number, line in enumerate(LINES) if any(matches(module, name) for name in line)]


def breaches(module: str, source: str, known: set[str]) -> list[str]:
    """What a module does that the layers do not allow, one sentence each."""
    found = []
    own = lines_of(module)
    if len(own) != 1:
        return [f"{module} stands on {len(own)} lines of the layers"]
    if FORBIDDEN_NAMES & set(module.split(".")):
        found.append(f"{module} has a name that says nothing")
    for imported in imports(source):
        package, _, inner = imported.target.partition(".")
        if package in ("grpc", "grpc_health") and module not in ("link.grpc", "link.health"):
            found.append(f"{module} imports grpc")
        if package in ("starlette", "uvicorn") and module != "dashboard.web":
            found.append(f"{module} imports {package}")
        if package == "torch" and imported.runs and any(matches(module, pattern) for pattern in WITHOUT_TORCH):
            found.append(f"{module} imports torch")
        if package != "pipar":
            continue
        target = inner if inner in known else f"{inner}.__init__".lstrip(".")
        if target not in known:
            continue  # a name inside a module, which is an import of its own
        if lines_of(target)[0] > own[0]:
            found.append(f"{module} imports {target}, which stands below it")
        if {module, target} == {"device", "server"} or (matches(module, "nn.*") and matches(target, "link.*")):
            found.append(f"{module} imports {target}, which it never may")
    return found


ALL = modules()


@pytest.mark.parametrize("module", ALL)
def test_imports_point_up(module: str) -> None:
    assert breaches(module, ALL[module], set(ALL)) == []


MADE_UP = {
    ("stages", "from pipar.server.program import Server"): "stages imports server, which stands below it",
    ("stages", "import pipar.server.program"): "stages imports server, which stands below it",
    ("nn.steps", "import pipar"): "nn.steps imports __init__, which stands below it",
    ("stages", "from pipar import server"): "stages imports server, which stands below it",
    (
        "planner.select",
        "def f():\n    from pipar.launch.virtual import run",
    ): "planner.select imports virtual, which stands",
    (
        "trace",
        "if TYPE_CHECKING:\n    from pipar.server.epoch_results import Ledger",
    ): "trace imports ledger, which stands below it",
    ("nn.steps", "from pipar.transport.channel import Channel"): "nn.steps imports link.channel, which stands below it",
    ("nn.steps", "from pipar.link import channel"): "nn.steps imports link.channel, which stands below it",
    ("device", "from pipar.server.program import Server"): "device imports server, which it never may",
    ("server", "import pipar.device.program"): "server imports device, which it never may",
    ("planner.costs", "import torch"): "planner.costs imports torch",
    ("protocol.wire", "def f():\n    from torch import nn"): "protocol.wire imports torch",
    ("link.memory", "import grpc"): "link.memory imports grpc",
    ("processes", "from grpc import aio"): "processes imports grpc",
    ("dashboard.serve", "import uvicorn"): "dashboard.serve imports uvicorn",
    ("link.helpers", ""): "link.helpers has a name that says nothing",
    ("newcomer", ""): "newcomer stands on 0 lines of the layers",
}


@pytest.mark.parametrize(("made_up", "sentence"), MADE_UP.items(), ids=lambda value: str(value)[:60])
def test_a_made_up_breach_is_found(made_up: tuple[str, str], sentence: str) -> None:
    module, source = made_up
    assert any(found.startswith(sentence) for found in breaches(module, source, set(ALL)))


def test_a_type_only_import_of_torch_is_no_breach() -> None:
    assert breaches("trace", "if TYPE_CHECKING:\n    import torch", set(ALL)) == []


@pytest.mark.parametrize("module", ["pipar", "pipar.launch.virtual", "pipar.job.prepare"])
def test_importing_does_not_import_torch_or_grpc(module: str) -> None:
    program = f"import sys, {module}; print([name for name in ('torch', 'grpc') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
