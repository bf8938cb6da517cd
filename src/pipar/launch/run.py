"""Training on this machine, in the real world or in virtual time: what `pipar run` and `pipar.run` do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipar import methods as known
from pipar.aggregation import check_method
from pipar.config import Config, check_private_updates, device_specs
from pipar.config_file import load_config, with_settings
from pipar.errors import ConfigError
from pipar.events import EpochResult, Observer, Started, ignore
from pipar.execution.schedule import count_batches
from pipar.execution.spans import Span
from pipar.job.job import Job
from pipar.job.prepare import prepare, prepare_timing_only
from pipar.launch.rehearsal import rehearse
from pipar.monitoring.tracker_threads import tracked
from pipar.storage.result import Result
from pipar.storage.run_folder import RunFolder, new_folder, remove_if_no_epochs, run_name, signals_deferred
from pipar.wording import guess_text, ruled_out_text

if TYPE_CHECKING:
    from pipar.job.workload import UserObjects

World = Literal["real", "virtual", "timing-only"]
WORLDS = ("real", "virtual", "timing-only")


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
    pictures: bool = False,
    command: str | None = None,
    report: bool = False,
) -> Result:
    """Train and return the result.

    `config` is a TOML file, nested dictionaries, a `Config` or None for the defaults; `settings` are
    "section.key=value" over it. `model` is an nn.Sequential of yours; `datasets` are yours, too: one for each device
    (a list or tuple in the order of the configuration, or a mapping by device name), or one to be partitioned.
    `validation` and `test` are held-out datasets, also beside a named dataset, whose own they replace. `observe` is
    told what happens, with `pictures` also what the lanes did in each epoch. `report` writes a page about the run into
    its folder when it is over.
    """
    if world not in WORLDS:
        raise ConfigError(f"'{world}' is not a world; there are {', '.join(WORLDS)}.")
    resolved = _configuration(config, settings, datasets)
    if world == "timing-only" and resolved.run.patience is not None:
        raise ConfigError("run.patience needs validation losses, and a timing-only run has none: leave it out.")
    with tracked(resolved, observe) as tracking:
        options = RunOptions(command if command is not None else "pipar.run", tracking.observe, report, pictures)
        result = _train(resolved, world, (model, datasets, validation, test), options)
        tracking.end(result.content)
        return result


def _train(config: Config, world: World, own: tuple[Any, ...], options: RunOptions) -> Result:
    """Train by a configuration that is known to be right; `own` is what the user brought: model and datasets."""
    model, datasets, _, _ = own
    if world == "timing-only" and model is None and datasets is None:
        job = prepare_timing_only(config, rehearse, options.observe)
        if job is not None:
            return _run_timing_only(job, options)
    from pipar.job.workload import UserObjects

    return _run_with_torch(config, UserObjects.of(config, *own), world, options)


def compare(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    methods: Sequence[str] = ("fl", "sl", "sfl", "pipar"),
    **options: Any,
) -> dict[str, Result]:
    """Train the same by several methods, one after another; return their results by method."""
    resolved = _configuration(config, options.pop("settings", ()), options.get("datasets"))
    configs = {method: with_method(resolved, method) for method in methods}  # what is wrong with one is found at once
    return {method: run(changed, **options) for method, changed in configs.items()}


def with_method(config: Config, method: str) -> Config:
    """Return the configuration with another method, checked; a given name is told apart by it."""
    name = f"{config.run.name}-{method}" if config.run.name else None
    run = config.run.model_copy(update={"method": known.method(method).name, "name": name})
    try:
        check_method(config.server.aggregator, known.method(method))
        changed = config.model_copy(update={"run": run})
        check_private_updates(changed)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    return changed


def _configuration(config: Any, settings: Sequence[str], datasets: Any) -> Config:
    if isinstance(config, Config):
        return with_settings(config, settings)
    if isinstance(config, str | Path):
        return load_config(Path(config), settings)
    tree: dict[str, Any] = dict(config or {})
    if "devices" not in tree and datasets is not None:
        tree |= _devices_for(datasets)
    return load_config(None, settings, tree)


def _devices_for(datasets: Any) -> dict[str, Any]:
    """Return a [[devices]] section with a device for each dataset; nothing if there is one dataset for all."""
    from pipar.job.workload import is_list_of_datasets

    if isinstance(datasets, Mapping):
        return {"devices": [{"name": name} for name in datasets]}
    return {"devices": [{"count": len(datasets)}]} if is_list_of_datasets(datasets) else {}


@dataclass(frozen=True)
class RunOptions:
    """What a run is to tell, and whom: the command in result.json, everything that happens, and a page at its end."""

    command: str
    observe: Observer = ignore
    report: bool = False
    pictures: bool = False  # of every epoch's lanes, for who observes

    def epoch_recorder(self, folder: RunFolder) -> Callable[[EpochResult, list[Span]], None]:
        """Return what takes an epoch: it goes to the folder, and to who observes."""
        return folder.epoch_recorder(self.observe, pictures=self.pictures)


def _run_timing_only(job: Job, options: RunOptions) -> Result:
    from pipar.launch.virtual import train_timing_only

    with _open_folder(job, options, "timing-only") as path:
        folder = RunFolder(path, job, world="timing-only", command=options.command)
        try:
            watch = folder.event_recorder(options.observe)
            train_timing_only(job, options.epoch_recorder(folder), watch, accountant=folder.accountant)
        finally:  # whatever ended it, the epochs so far are kept
            with signals_deferred():
                content = folder.finish()
        return Result(path, content)


def _run_with_torch(config: Config, own: UserObjects, world: World, options: RunOptions) -> Result:
    from pipar.job.workload import Workload

    if world == "real":
        _check_real_world(config)
    workload = Workload(config, own)
    job = prepare(workload, rehearse, options.observe)
    if world == "timing-only":
        return _run_timing_only(job, options)
    if world == "virtual":
        return _run_virtual(job, workload, options)
    return _run_real(job, workload.for_processes(), options)


def _run_virtual(job: Job, workload: Any, options: RunOptions) -> Result:
    from pipar.job.model_setup import make_learner, measure_test_accuracy
    from pipar.launch.virtual import train_virtually

    learner = make_learner(job, workload)
    with _open_folder(job, options, "virtual") as path:
        folder = RunFolder(path, job, world="virtual", command=options.command)
        try:
            watch = folder.event_recorder(options.observe)
            train_virtually(job, workload, options.epoch_recorder(folder), watch, learner, accountant=folder.accountant)
        finally:  # whatever ended the training, the epochs so far and the last global model are kept
            with signals_deferred():
                folder.finish(weights=learner.packed_state(), weights_sha256=learner.sha256())
        return Result(path, folder.add_test_accuracy(measure_test_accuracy(learner, workload)))


def _run_real(job: Job, own: UserObjects, options: RunOptions) -> Result:
    from pipar.launch.processes import train_in_processes

    with _open_folder(job, options, "real") as folder:
        train_in_processes(job, own, folder, options.command, options.observe, pictures=options.pictures)
        return Result(folder, json.loads((folder / "result.json").read_text("utf-8")))


def _check_real_world(config: Config) -> None:
    """Raise if real processes cannot be what the configuration says: a device's speed, the server's port."""
    from pipar.launch.processes import check_address

    fast = [spec.name for spec in device_specs(config) if spec.speed > 1]
    fast += ["the server"] if config.server.speed > 1 else []
    if fast:
        raise ConfigError(
            f"{fast[0]} is to be faster than this machine: in the real world a speed is at most 1. Use --virtual."
        )
    check_address(config.server.listen)


@contextmanager
def _open_folder(job: Job, options: RunOptions, world: World) -> Iterator[Path]:
    """Make the run's folder and say that the training begins; when it is over, write its page, if there is to be one.

    A run that fails at once leaves no folder behind.
    """
    folder = new_folder(run_name(job.config, job.model, job.dataset))
    options.observe(started_event(job, folder, world))
    try:
        yield folder
    except KeyboardInterrupt:
        if not (folder / "result.json").exists():
            remove_if_no_epochs(folder)
        _leave_report(folder, options, None)  # who has pressed Ctrl-C does not wait for an outlook
        raise
    except Exception:
        remove_if_no_epochs(folder)
        _leave_report(folder, options, None)
        raise
    _leave_report(folder, options, job)


def _leave_report(folder: Path, options: RunOptions, job: Job | None) -> None:
    if options.report and (folder / "metrics.jsonl").exists():
        from pipar.report import try_write_report

        try_write_report(folder, options.observe, job=job)


def started_event(job: Job, folder: Path, world: World = "real") -> Started:
    """Return what is said when a training begins."""
    run, cut = job.config.run, job.batch_statistics
    return Started(
        folder=str(folder),
        method=run.method,
        epochs=run.epochs,
        cores=job.cores,
        plans={name: str(plan) for name, plan in sorted(job.plans.items())},
        samples=dict(job.sizes),
        iterations={
            name: sum(count_batches(n, run.batch_size, batch_statistics=cut).values()) for name, n in job.sizes.items()
        },
        world=world,
        is_private=job.update_noise is not None,
        leakage=_leakage_text(job),
    )


def _leakage_text(job: Job) -> str:
    most = job.config.privacy.max_leakage
    if most is None or not job.method.splits:
        return ""
    return f"{ruled_out_text(most, job.leaky_cuts)}. {guess_text(most, job.leakage_guess)}".strip()
