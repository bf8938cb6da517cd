"""The checks of `pipar doctor`: the machine and the installation, each with one line of advice.

Functions that find facts are separate from the `check_...` functions that judge them, which are pure.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pipar.cli.machine_limits import Limits, available_memory, limits
from pipar.data.catalog import DatasetInfo, data_folder, known_datasets
from pipar.errors import ConfigError, describe
from pipar.monitoring.tracker import TRACKER_PACKAGES, is_package
from pipar.profiling.cache import cache_folder, usable_cores
from pipar.profiling.memory import BASE_BYTES
from pipar.profiling.profile import Profile
from pipar.settings.config import Config
from pipar.storage.run_names import runs_folder
from pipar.transport import open_files
from pipar.transport.addresses import why_not_listening
from pipar.transport.expiry import SOON, expiring_files
from pipar.transport.limits import Limits as ServerLimits
from pipar.units import format_bytes, split_address

State = Literal["ok", "advice", "problem"]

_LEAST_PYTHON = (3, 11)
#: With less than the first, no run fits; with less than the second, only a small one.
_LEAST_DISK, _GOOD_DISK = 100_000_000, 1_000_000_000
_GOOD_MEMORY = 2 * 2**30
#: Doubtful profiles that are named.
_MOST_SHOWN = 3
#: Modules with native code, which may be installed but fail to load, and their packages.
NATIVE_MODULES = {
    "numpy": "numpy",
    "grpc": "grpcio",
    "cryptography": "cryptography",
    "safetensors": "safetensors",
    "zstandard": "zstandard",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
}


@dataclass(frozen=True)
class Extra:
    """An optional feature: the packages that it needs, and its purpose."""

    packages: tuple[str, ...]
    purpose: str


EXTRAS = {
    "tensorboard": Extra(TRACKER_PACKAGES["tensorboard"].packages, "--tracker tensorboard"),
    "mlflow": Extra(TRACKER_PACKAGES["mlflow"].packages, "--tracker mlflow"),
    "wandb": Extra(TRACKER_PACKAGES["wandb"].packages, "--tracker wandb, Weights & Biases"),
    "privacy": Extra(("dp-accounting",), "epsilon of noise on updates"),
    "metrics": Extra(("torchmetrics",), "task.metrics by name"),
    "notebook": Extra(("matplotlib", "pandas"), "figures and tables of results in Python"),
    "timm": Extra(("timm",), "examples/timm_network.toml"),
    "minilm": Extra(("transformers",), "examples/minilm.toml"),
    "reproduce": Extra(("dp-accounting", "matplotlib"), "figures and privacy of python -m reproduction"),
}


@dataclass(frozen=True)
class Finding:
    """The result of one check. A problem must be fixed before pipar works; advice is optional."""

    check: str
    state: State
    found: str
    advice: str = ""


def examine(config: Config) -> list[Finding]:
    """Return the results of all checks on this machine, for this configuration."""
    facts = torch_facts()
    return [
        check_python(sys.version_info[:3]),
        check_packages(required_packages(), loading_errors(list(NATIVE_MODULES))),
        check_torch(facts),
        check_accelerators(facts),
        check_cores(os.cpu_count() or 1, usable_cores(), limits().cores),
        check_memory(available_memory(), limits()),
        check_open_files(open_files.limits()[1]),
        check_folder("runs", runs_folder(), "PIPAR_RUNS"),
        check_folder("profiles", cache_folder(), "XDG_CACHE_HOME", kept=_profiles(cache_folder())),
        *check_profiles(cache_folder()),
        *check_ports(config.server.listen, why_not_listening),
        *check_certificates(Path("certs")),
        *check_data(config, known_datasets(_data_path(config)), data_folder(_data_path(config))),
        *(check_extra(name, extra, installed) for name, extra in EXTRAS.items()),
        check_links(programs_missing(("ip", "tc")), why_no_namespace()),
    ]


def is_usable(findings: Iterable[Finding]) -> bool:
    """Return whether pipar works: there is no problem."""
    return all(finding.state != "problem" for finding in findings)


# --- Python and packages


def check_python(version: Sequence[int]) -> Finding:
    words = ".".join(map(str, version))
    if tuple(version[:2]) < _LEAST_PYTHON:
        least = ".".join(map(str, _LEAST_PYTHON))
        return Finding(
            "Python", "problem", words, f"pipar needs Python {least} or newer: install it, then install pipar with it."
        )
    return Finding("Python", "ok", words)


def required_packages() -> dict[str, str | None]:
    """Return every package that pipar needs, with its installed version."""
    names = [re.split(r"[^\w.-]", line)[0] for line in metadata.requires("pipar") or () if "extra ==" not in line]
    return {name: installed(name) for name in names}


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is missing, "" if another package provides its module."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "" if is_package(package.replace("-", "_")) else None


def loading_errors(modules: Sequence[str]) -> dict[str, str]:
    """Return, by module, why an installed module cannot be imported."""
    errors = {}
    for name in modules:
        if importlib.util.find_spec(name) is not None and (why := _why_not_imported(name)):
            errors[name] = why
    return errors


def _why_not_imported(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a broken package may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def check_packages(versions: Mapping[str, str | None], errors: Mapping[str, str]) -> Finding:
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Finding("packages", "problem", f"missing: {', '.join(missing)}", "Install pipar again: pip install -e .")
    if errors:
        name, why = next(iter(errors.items()))
        advice = f"Install it again: pip install --force-reinstall {NATIVE_MODULES.get(name, name)}"
        return Finding("packages", "problem", f"{name} does not load: {why}", advice)
    return Finding("packages", "ok", f"all {len(versions)} are installed, and those with native code load")


@dataclass(frozen=True)
class TorchFacts:
    """Facts about torch; `error` if it cannot be imported."""

    version: str = ""
    threads: int = 0
    capability: str = ""
    import_s: float = 0.0
    error: str = ""
    accelerators: tuple[str, ...] = ()


def torch_facts() -> TorchFacts:
    """Import torch and return its facts."""
    began = time.monotonic()
    if error := _why_not_imported("torch"):
        return TorchFacts(error=error)
    torch: Any = sys.modules["torch"]
    took = time.monotonic() - began
    capability = str(torch.backends.cpu.get_cpu_capability())
    found = tuple(_accelerators())
    return TorchFacts(str(torch.__version__), int(torch.get_num_threads()), capability, took, accelerators=found)


def _accelerators() -> Iterator[str]:
    """Yield what each accelerator is that torch finds, or why it cannot be used."""
    from pipar.tensors.torch_device import TorchDevice, accelerators  # imports torch

    for name in accelerators():
        try:
            yield str(TorchDevice(name))
        except Exception as error:  # noqa: BLE001 - a driver may raise anything
            yield f"{name} ({describe(error)})"


def check_torch(facts: TorchFacts) -> Finding:
    if facts.error:
        advice = "Install it: pip install -c constraints.txt torch. Only timing-only runs work without it."
        return Finding("torch", "problem", facts.error, advice)
    threads = "one thread" if facts.threads == 1 else f"{facts.threads} threads"
    words = f"{facts.version}, {threads}, {facts.capability}, imported in {facts.import_s:.1f} s"
    if facts.capability in ("DEFAULT", "NO AVX"):
        return Finding("torch", "advice", words, "It uses no vector instructions on this machine: training is slow.")
    return Finding("torch", "ok", words)


def check_accelerators(facts: TorchFacts) -> Finding:
    """Judge what a torch_device may be; a machine without accelerators trains on its CPU."""
    return Finding(
        "accelerators", "ok", "; ".join(facts.accelerators) or "none that torch finds: training uses the CPU"
    )


# --- cores and memory


def check_cores(cores: int, usable: int, limit: float | None) -> Finding:
    words = f"{usable} of {cores}" if usable < cores else str(cores)
    if limit is not None and limit < usable:
        fewer = max(1, int(limit))
        advice = f"The container is limited to {limit:g}: use --set server.cores={fewer}, or plans assume all of them."
        return Finding("cores", "advice", f"{words}, limited to {limit:g}", advice)
    return Finding("cores", "ok", words)


def check_memory(available: int | None, limits: Limits) -> Finding:
    left = None if limits.memory_bytes is None else max(0, limits.memory_bytes - limits.memory_used)
    known = [amount for amount in (available, left) if amount is not None]
    if not known:
        return Finding("memory", "ok", "unknown")
    least = min(known)
    words = f"{format_bytes(least)} free" + ("" if left != least else ", the container's limit")
    if least < BASE_BYTES:
        advice = f"One process with torch takes {format_bytes(BASE_BYTES)}: close other programs, or use --timing-only."
        return Finding("memory", "problem", words, advice)
    if least < _GOOD_MEMORY:
        advice = "A real run has one process per device: use few devices, or --virtual, which needs only one process."
        return Finding("memory", "advice", words, advice)
    return Finding("memory", "ok", words)


def check_open_files(most: int) -> Finding:
    """Judge how many files a process may open: every connection of a server is one of them."""
    connections, wanted = open_files.most_connections(ServerLimits().connections, most), ServerLimits().connections
    words = f"{most} files, a server accepts {connections} connections"
    if connections < wanted:
        advice = (
            f"For {wanted} connections raise the limit to {wanted + open_files.RESERVED_FILES}: `ulimit -Hn`, or "
            "LimitNOFILE= in the systemd unit."
        )
        return Finding("open files", "advice", words, advice)
    return Finding("open files", "ok", words)


# --- folders and ports


def check_folder(check: str, folder: Path, variable: str, kept: str = "") -> Finding:
    """Return whether files can be written to a folder that exists or can be created."""
    place = nearest(folder)
    elsewhere = f"set {variable} to a folder with more space"
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return Finding(check, "problem", f"{folder} is not writable", f"Grant write permission, or {elsewhere}.")
    free = shutil.disk_usage(place).free
    words = ", ".join(filter(None, [str(folder), f"{format_bytes(free)} free", kept]))
    if free < _LEAST_DISK:
        return Finding(check, "problem", words, f"Free some space, or {elsewhere}.")
    if free < _GOOD_DISK:
        return Finding(check, "advice", words, f"Checkpoints of a large network may not fit: {elsewhere}.")
    return Finding(check, "ok", words)


def nearest(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    path = folder.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _profiles(folder: Path) -> str:
    count = len(list(folder.glob("*.json")))
    return "no profile yet" if count == 0 else f"{count} profile{'' if count == 1 else 's'}"


def check_profiles(folder: Path) -> list[Finding]:
    """Return which kept profiles were measured on a busy machine, or are implausible; nothing if none was."""
    doubts = []
    for path in sorted(folder.glob("*.json")):
        with suppress(ConfigError):  # another version's, or another file: it is not used
            profile = Profile.load(path)
            if profile.doubt:
                doubts.append(f"that of {profile.model} ({path.name}) {profile.doubt}")
    if not doubts:
        return []
    more = f"; and {len(doubts) - _MOST_SHOWN} more" if len(doubts) > _MOST_SHOWN else ""
    advice = (
        "Predicted and virtual times may be wrong. When the machine is quiet, measure again with 'pipar profile' and "
        f"the same configuration, or delete the files in {folder}: the next run measures again."
    )
    return [Finding("measured", "advice", "; ".join(doubts[:_MOST_SHOWN]) + more, advice)]


def check_ports(listen: str, why_not: Callable[[str], str]) -> list[Finding]:
    """Return whether processes can connect over loopback, and whether the server's port is free."""
    loopback = "127.0.0.1:0"
    if why := why_not(loopback):
        advice = "Without loopback only virtual time works: bring up the network interface lo."
        return [Finding("loopback", "problem", f"cannot listen on 127.0.0.1: {why}", advice)]
    found = [Finding("loopback", "ok", "ports of 127.0.0.1 are available")]
    if split_address(listen)[1] == 0:
        return found
    if why := why_not(listen):
        advice = "End the program that uses it, or give another address with --listen or server.listen."
        return [*found, Finding("server port", "problem", f"{listen}: {why}", advice)]
    return [*found, Finding("server port", "ok", f"{listen} is free")]


# --- data, extras, links


def _data_path(config: Config) -> Path | None:
    return Path(config.data.path) if config.data.path else None


def check_certificates(folder: Path) -> list[Finding]:
    """Return whether the certificates in a folder of `pipar certs` are valid for another month; nothing without one."""
    files = sorted([*folder.glob("*.pem"), *folder.glob("devices/*.pem")])
    if not files:
        return []
    if sentences := expiring_files(files):
        return [Finding("certificates", "advice", f"{len(sentences)} of {len(files)} end soon", " ".join(sentences))]
    return [Finding("certificates", "ok", f"{len(files)} in {folder}, all valid for more than {SOON.days} days")]


def check_data(config: Config, datasets: Sequence[DatasetInfo], folder: Path) -> list[Finding]:
    """Return which datasets are complete here, and whether that of the configuration is."""
    builtin = [info.name for info in datasets if info.builtin]
    here = [info.name for info in datasets if info.found is not None]
    wanted = next((info for info in datasets if info.name == config.data.name), None)
    words = f"{', '.join(builtin)} built in; {', '.join(here) or 'none'} in {folder}"
    if config.data.factory is None and wanted is not None and not wanted.builtin and wanted.found is None:
        advice = f"Download it: pipar data get {wanted.name}. Timing-only runs and plans work without it."
        return [Finding("data", "problem", f"{wanted.name} is not complete in {folder}", advice)]
    if os.environ.get("PIPAR_DATA") and not folder.is_dir():
        advice = "Set PIPAR_DATA to the folder of the datasets, or unset it to use ~/.cache/pipar/data."
        return [Finding("data", "advice", f"PIPAR_DATA is {folder}, which does not exist", advice)]
    if config.data.factory is not None:
        advice = "It is called when pipar needs the samples: 'pipar plan' with the same configuration shows its errors."
        return [Finding("data", "advice", f"data.factory {config.data.factory} is not checked; {words}", advice)]
    return [Finding("data", "ok", words)]


def check_extra(name: str, extra: Extra, version_of: Callable[[str], str | None]) -> Finding:
    versions = {package: version_of(package) for package in extra.packages}
    if None in versions.values():
        return Finding(
            name, "advice", f"not installed, for {extra.purpose}", f"To install it: pip install 'pipar[{name}]'"
        )
    words = ", ".join(f"{package} {version}".strip() for package, version in versions.items())
    return Finding(name, "ok", f"{words}, for {extra.purpose}")


def programs_missing(programs: Sequence[str]) -> list[str]:
    return [program for program in programs if shutil.which(program) is None]


def why_no_namespace() -> str:
    """Return why network namespaces, which the kernel's links need, are not available; "" if they are."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    try:
        done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return done.stderr.strip().rpartition(": ")[2].lower() if done.returncode else ""


def check_links(missing: Sequence[str], why_not: str) -> Finding:
    """Return how links can be emulated: always by pipar's pacing; by the kernel, for some tests, if possible."""
    ours = "pipar's own pacing works everywhere"
    if missing:
        advice = f"Only tests with links of the kernel need {' and '.join(missing)}: install iproute2."
        return Finding("links", "advice", ours, advice)
    if why_not:
        return Finding(
            "links", "advice", ours, f"Only tests with links of the kernel need namespaces, as root ({why_not})."
        )
    return Finding("links", "ok", f"{ours}; the kernel's (tc, ip netns) can be used too")


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return what `pipar doctor --json` prints."""
    rows = [
        {"check": one.check, "state": one.state, "found": one.found, "advice": one.advice or None} for one in findings
    ]
    return {"usable": is_usable(findings), "findings": rows}
