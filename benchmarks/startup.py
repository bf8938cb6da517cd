"""How long commands take to start, now and in an earlier version: interleaved repetitions, medians, wall and CPU time.

PIPAR_BEFORE is a folder with the sources of the earlier version, as `git worktree add FOLDER COMMIT` makes one; without
it, only this version is measured. CPU seconds are those of all processes of a command, the fork server's too.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import Claim

_ROOT = Path(__file__).parents[1]
_BECOME_REAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl
_SHORT, _LONG = 7, 3
_TINY = [
    "--epochs=1", "--devices=2", "--set=data.samples_per_device=20", "--set=data.validation=10",
    "--set=data.test=10", "--set=run.batch_size=10",
]  # fmt: skip
_PIPAR = [sys.executable, "-m", "pipar"]
#: By name, a command that runs to its end, and how often.
_WHOLE: Mapping[str, tuple[list[str], int]] = {
    "`pipar --help`": ([*_PIPAR, "--help"], _SHORT),
    "`import pipar`": ([sys.executable, "-c", "import pipar"], _SHORT),
    "tiny timing-only run": ([*_PIPAR, "run", "--timing-only", *_TINY], _LONG),
    "tiny virtual run": ([*_PIPAR, "run", "--virtual", *_TINY], _LONG),
    "tiny real run": ([*_PIPAR, "run", *_TINY], _LONG),
}
#: Commands whose first line is timed.
_FIRST_LINES = (
    ["run"], ["compare"], ["plan"], ["profile"], ["server", "--listen=127.0.0.1:0"],
    ["device", "--server=127.0.0.1:9", "--name=device-1"],
)  # fmt: skip
_PROFILING = """
import time
from pipar.job.profiles import measured_profile
from pipar.job.workload import Workload
from pipar.settings.config_file import load_config
workload = Workload(load_config(None))
model = workload.checked_model()
start = time.perf_counter()
measured_profile(workload, model, fresh=True)
print(time.perf_counter() - start)
"""
#: Lines of `pipar run` without a terminal: the title of the epochs, and the first one.
_TITLE, _FIRST_EPOCH = "epoch ", "    1 "


@dataclass(frozen=True)
class Version:
    """The sources of one version, and folders of its own."""

    name: str
    sources: Path
    folder: Path

    def environment(self, cache: str = "cache") -> dict[str, str]:
        own = {"PYTHONPATH": f"{self.sources / 'src'}", "XDG_CACHE_HOME": str(self.folder / cache)}
        return {**os.environ, **own, "PIPAR_RUNS": str(self.folder / "runs"), "NO_COLOR": "1"}


Times = dict[str, dict[str, list[float]]]


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    ctypes.CDLL(None).prctl(_BECOME_REAPER, 1)
    versions = [Version("now", _ROOT, folder / "now")]
    if before := os.environ.get("PIPAR_BEFORE"):
        versions.insert(0, Version("before", Path(before).resolve(), folder / "before"))
    found: dict[str, Times] = {version.name: {} for version in versions}
    for version in versions:  # the network is profiled, and everything is read from the disk once
        version.folder.mkdir()
        _seconds([*_PIPAR, "run", "--timing-only", *_TINY], version)
    for name, (command, count) in _WHOLE.items():
        for _ in range(count):
            for version in versions:
                wall_s, cpu_s = _seconds(command, version)
                _add(found[version.name], name, wall_s=wall_s, cpu_s=cpu_s)
    for number in range(_LONG):
        for version in versions:
            _add(found[version.name], "profiling VGG-5", wall_s=_profiling_s(version, number))
            title_s, epoch_s = _until_lines(["run"], version, (_TITLE, _FIRST_EPOCH), f"empty-{number}")
            _add(found[version.name], "defaults, empty cache", to_title_s=title_s, to_first_epoch_s=epoch_s)
    for words in _FIRST_LINES:
        for number in range(_LONG):
            for version in versions if words[0] in ("run", "server") else versions[-1:]:
                (line_s,) = _until_lines(words, version, ("",), f"line-{number}")
                _add(found[version.name], f"first line of `pipar {words[0]}`", wall_s=line_s)
    return _claims(found), {"commit_before": _commit(versions[0]), **found}


def _add(times: Times, name: str, **measured: float) -> None:
    for kind, value in measured.items():
        times.setdefault(name, {}).setdefault(kind, []).append(round(value, 3))


def _seconds(command: Sequence[str], version: Version) -> tuple[float, float]:
    """Return the wall seconds of a command, and the CPU seconds of all its processes."""
    before, start = _cpu_s(), time.perf_counter()
    environment = version.environment()
    subprocess.run(command, env=environment, check=True, capture_output=False, stdout=_NOWHERE, stderr=_NOWHERE)
    wall_s = time.perf_counter() - start
    _reap()
    return wall_s, _cpu_s() - before


_NOWHERE = subprocess.DEVNULL


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _reap() -> None:
    """Wait for all processes that a command has left, such as its fork server."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def _profiling_s(version: Version, number: int) -> float:
    command = [sys.executable, "-c", _PROFILING]
    environment = version.environment(f"profiling-{number}")
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def _until_lines(words: Sequence[str], version: Version, starts: Sequence[str], cache: str) -> list[float]:
    """Return the seconds until a command writes lines with these beginnings to standard error; then end it."""
    found: list[float] = []
    start = time.perf_counter()
    with subprocess.Popen(
        [*_PIPAR, *words], env=version.environment(cache), stdout=_NOWHERE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as program:  # fmt: skip
        assert program.stderr is not None
        for line in program.stderr:
            if line.startswith(starts[len(found)]):
                found.append(time.perf_counter() - start)
                if len(found) == len(starts):
                    break
        os.killpg(program.pid, signal.SIGKILL)
    _reap()
    if len(found) < len(starts):
        raise RuntimeError(f"pipar {' '.join(words)} of {version.sources} did not write {starts[len(found)]!r}")
    return found


def _claims(found: Mapping[str, Times]) -> list[Claim]:
    claims = []
    bounds = {("`pipar --help`", "wall_s"): 0.4, ("profiling VGG-5", "wall_s"): 5.0}
    for version, times in found.items():
        for name, kinds in times.items():
            for kind, values in kinds.items():
                most = bounds.get((name, kind)) if version == "now" else None
                if name.startswith("first line") and version == "now":
                    most = 1.0
                claims.append(Claim(_what(name, kind, version), statistics.median(values), "s", most=most))
    return claims


def _what(name: str, kind: str, version: str) -> str:
    kinds = {"to_title_s": " to the first line of the training", "to_first_epoch_s": " to the end of the first epoch"}
    return f"{name}{kinds.get(kind, ', CPU' if kind == 'cpu_s' else '')}, {version}"


def _commit(version: Version) -> str | None:
    if version.name != "before":
        return None
    command = ["git", "-C", str(version.sources), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
