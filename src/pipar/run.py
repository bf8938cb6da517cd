"""Training on this machine, in the real world or in virtual time: what `pipar run` and `pipar.run` do."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipar.config import Config, config_from, load_config
from pipar.errors import ConfigError
from pipar.events import EpochResult, Observer, ignore
from pipar.job import Job
from pipar.prepare import prepare, prepare_without_torch
from pipar.results import RunFolder, new_folder, run_name
from pipar.trace import Span

if TYPE_CHECKING:
    import torch

    from pipar.workload import Own

World = Literal["real", "virtual", "timing-only"]
WORLDS = ("real", "virtual", "timing-only")


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, and what result.json says."""

    folder: Path
    content: Mapping[str, Any]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        return list(self.content["epochs"])

    @property
    def test_accuracy(self) -> float | None:
        accuracy = self.content["test_accuracy"]
        return None if accuracy is None else float(accuracy)

    @property
    def seconds_per_epoch(self) -> float:
        """The mean over the epochs."""
        seconds = [float(epoch["seconds"]) for epoch in self.epochs]
        return sum(seconds) / len(seconds)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the trained weights, to be loaded into the same network."""
        import safetensors.torch

        return safetensors.torch.load_file(self.folder / "model.safetensors")


def run(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    world: World = "real",
    model: Any = None,
    datasets: Any = None,
    validation: Any = None,
    test: Any = None,
    settings: Sequence[str] = (),
    observe: Observer = ignore,
    command: str | None = None,
) -> Result:
    """Train and return the result.

    `config` is a TOML file, nested dictionaries, a `Config` or None for the defaults; `settings` are
    "section.key=value" over it. `model` is an nn.Sequential of yours; `datasets` are yours, too: one for each device
    (a list, or a mapping by device name), or one to be partitioned. `validation` and `test` are held-out datasets.
    """
    if world not in WORLDS:
        raise ConfigError(f"'{world}' is not a world; there are {', '.join(WORLDS)}.")
    resolved = _configuration(config, settings, datasets)
    words = command if command is not None else "pipar.run"
    if world == "timing-only" and model is None and datasets is None:
        job = prepare_without_torch(resolved)
        if job is not None:
            return _run_timing_only(job, words, observe)
    from pipar.workload import Own

    own = Own.of(resolved, model, datasets, validation, test)
    return _run_with_torch(resolved, own, world, words, observe)


def compare(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    methods: Sequence[str] = ("fl", "sl", "sfl", "pipar"),
    **options: Any,
) -> dict[str, Result]:
    """Train the same by several methods, one after another; return their results by method."""
    resolved = _configuration(config, options.pop("settings", ()), options.get("datasets"))
    return {method: run(with_method(resolved, method), **options) for method in methods}


def with_method(config: Config, method: str) -> Config:
    """Return the configuration with another method, checked; a given name is told apart by it."""
    tree = config.model_dump()
    tree["run"]["method"] = method
    if tree["run"]["name"]:
        tree["run"]["name"] += f"-{method}"
    return config_from(tree)


def _configuration(config: Any, settings: Sequence[str], datasets: Any) -> Config:
    if isinstance(config, Config):
        return config
    if isinstance(config, str | Path):
        return load_config(Path(config), settings)
    tree: dict[str, Any] = dict(config or {})
    if "devices" not in tree and isinstance(datasets, Mapping):
        tree["devices"] = [{"name": name} for name in datasets]
    elif "devices" not in tree and isinstance(datasets, list):
        tree["devices"] = [{"count": len(datasets)}]
    return load_config(None, settings, tree)


def _run_timing_only(job: Job, command: str, observe: Observer) -> Result:
    from pipar.virtual import train_without_mathematics

    folder = RunFolder(new_folder(run_name(job.config)), job, world="timing-only", command=command)
    train_without_mathematics(job, _emitter(folder, observe), observe)
    return Result(folder.path, folder.finish(test_accuracy=None, weights=None, weights_sha256=None))


def _run_with_torch(config: Config, own: Own, world: World, command: str, observe: Observer) -> Result:
    from pipar.workload import Workload

    workload = Workload(config, own)
    job = prepare(workload, observe)
    if world == "timing-only":
        return _run_timing_only(job, command, observe)
    if world == "virtual":
        return _run_virtual(job, workload, command, observe)
    return _run_real(job, own, command, observe)


def _run_virtual(job: Job, workload: Any, command: str, observe: Observer) -> Result:
    from pipar.torchside import test_accuracy
    from pipar.virtual import train_virtually

    folder = RunFolder(new_folder(run_name(job.config)), job, world="virtual", command=command)
    learner = train_virtually(job, workload, _emitter(folder, observe), observe)
    accuracy = test_accuracy(learner, workload)
    content = folder.finish(test_accuracy=accuracy, weights=learner.packed_state(), weights_sha256=learner.sha256())
    return Result(folder.path, content)


def _run_real(job: Job, own: Own, command: str, observe: Observer) -> Result:
    from pipar.processes import train_in_processes

    fast = [spec.name for spec in job.specs if spec.speed > 1]
    if fast:
        raise ConfigError(
            f"{fast[0]} is to be faster than this machine: in the real world a speed is at most 1. Use --virtual."
        )
    folder = new_folder(run_name(job.config))
    train_in_processes(job, own, folder, command, observe)
    return Result(folder, json.loads((folder / "result.json").read_text("utf-8")))


def _emitter(folder: RunFolder, observe: Observer) -> Any:
    def emit(result: EpochResult, spans: list[Span]) -> None:
        folder.add_epoch(result, spans)
        observe(result)

    return emit


def command_line() -> str:
    """Return the command as it was typed, without where the program lies."""
    return " ".join(["pipar", *sys.argv[1:]])
