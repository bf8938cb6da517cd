"""Training on this machine, in the real world or in virtual time: what `pipar run` and `pipar.run` do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipar import methods as known
from pipar.errors import ConfigError
from pipar.events import (
    LOADING,
    EpochResult,
    Observer,
    Preparing,
    Started,
    Starting,
    TimedByPrograms,
    ignore,
    tell_all,
)
from pipar.execution.spans import Span
from pipar.job.equivalence import equivalence_reasons
from pipar.job.job import Job
from pipar.job.prepare import prepare, prepare_timing_only
from pipar.launch.callbacks import Callback, Callbacks
from pipar.launch.child_processes import start_fork_server
from pipar.launch.final_model import final_files
from pipar.launch.rehearsal import rehearse
from pipar.launch.uncollected import uncollected
from pipar.monitoring.progress_display import shown
from pipar.monitoring.tracker_threads import tracked
from pipar.recording.recorder import check_can_record, recorded
from pipar.server.allow_list import AllowList
from pipar.settings.aggregators import check_method
from pipar.settings.config import (
    Config,
    check_clipping,
    check_private_updates,
    device_names,
    device_specs,
    validated_keys,
)
from pipar.settings.config_file import config_from, load_config, with_settings
from pipar.settings.metrics import shown_name
from pipar.settings.optimizers import OWN
from pipar.settings.wording import guess_text, ruled_out_text, setting_text, training_text
from pipar.storage.comparison import Comparison
from pipar.storage.result import Result
from pipar.storage.run_folder import RunFolder, save_result, without_signals
from pipar.storage.run_lock import folder_locked
from pipar.storage.run_names import new_folder, remove_if_no_epochs, run_name

if TYPE_CHECKING:
    from pipar.job.user_objects import UserObjects
    from pipar.job.workload import Workload

World = Literal["real", "virtual", "timing-only"]
WORLDS = ("real", "virtual", "timing-only")


def run(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    world: World = "real",
    model: Any = None,
    cut_points: Sequence[str] | None = None,
    datasets: Any = None,
    validation: Any = None,
    test: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    optimizer: Callable[[list[tuple[str, Any]]], Any] | None = None,
    evaluation_datasets: Any = None,
    settings: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    observe: Observer = ignore,
    pictures: bool = False,
    command: str | None = None,
    report: bool = False,
    record: bool = False,
    programs: bool = False,
) -> Result:
    """Train and return the result.

    - `config`: a TOML file, nested dictionaries, a `Config`, or None for the defaults. `settings` are strings
      "section.key=value" that override it.
    - `world`: "real" (processes on this machine), "virtual" or "timing-only".
    - `model`: your own nn.Module, which is not changed. `cut_points` limits its cuts to these modules, given by their
      paths in order of execution.
    - `datasets`: your own training data. One dataset for each device, as a list or tuple in the order of the
      configuration or as a mapping by device name; or a single dataset, which is partitioned. `validation` and `test`
      are your own held-out datasets, and replace those of a named dataset. `evaluation_datasets`, one for each device,
      are what devices evaluate the global model on after every round, and do not train on.
    - `loss`: your own function of (outputs, targets) that returns the mean loss over the samples. If the mean is over
      something else, the attribute `count` of the function is a function of targets that returns its number.
    - `metrics`: functions by name, which validation and test compute in addition to `task.metrics`.
    - `optimizer`: your own function, which replaces `optimizer.name` and its arguments. It gets the trained parameters
      of one part of the network as a list of (name, parameter), and returns a torch.optim.Optimizer over them.
    - `callbacks`: functions that get the results of each epoch. If one returns `pipar.STOP`, the training ends after
      the current round. An error in one also ends the training, and is raised after everything is saved.
    - `progress`: None shows the progress in a terminal and in a notebook, True also prints lines elsewhere, False shows
      nothing.
    - `observe`: a function that gets each event; with `pictures` also the lanes of each epoch.
    - `report` writes an HTML report into the run's folder at the end. `record` writes a recording into it, which
      `pipar replay` reads.
    - `programs` lets the programs time a timing-only run also where the simulator, which takes a fraction of the time,
      gives the same result.
    - `command`: the command that result.json names.

    >>> result = pipar.run({"run": {"epochs": 3}}, world="timing-only", settings=SMALL[1:])
    >>> [epoch["epoch"] for epoch in result.epochs]
    [1, 2, 3]

    An optimiser with a separate group for norms and biases, which are vectors:

    >>> def adamw(named):
    ...     matrices, vectors = ([one for _, one in named if (one.ndim > 1) == wide] for wide in (True, False))
    ...     return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.002)
    >>> own = {"model": torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)), "optimizer": adamw}
    >>> data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.arange(20) % 2)
    >>> pipar.run(world="virtual", **own, datasets=[data], settings=SMALL).content["equivalence"]
    'exact'
    """
    if world not in WORLDS:
        raise ConfigError(f"world = '{world}' is unknown: use one of {', '.join(WORLDS)}.")
    resolved = with_functions(configuration_of(config, settings, datasets, cut_points), loss, metrics, optimizer)
    if world == "timing-only":
        _check_needs_no_losses(resolved)
    elif programs:
        raise ConfigError(
            f"Only a timing-only run may do without the programs: programs does not fit world = '{world}'."
        )
    _check_allowed(resolved)
    if record:
        check_can_record(resolved)
    called = Callbacks(callbacks)
    with (
        shown_as("run", resolved, progress, model=model, datasets=datasets) as show,
        tracked(resolved, tell_all(show, observe, called.observe)) as tracking,
    ):
        typed = command if command is not None else "pipar.run"
        options = RunOptions(typed, tracking.observe, report, pictures, record, called, programs)
        own = (model, datasets, validation, test, loss, metrics, optimizer, evaluation_datasets)
        result = _train(resolved, world, own, options)
        tracking.end(result.content)
    called.raise_error()
    return result


def shown_as(
    program: str,
    config: Config,
    progress: bool | None,
    methods: Iterable[str] = (),
    *,
    model: Any = None,
    datasets: Any = None,
) -> AbstractContextManager[Observer]:
    """Return a display of the progress of a program, with its method or these methods."""
    network, _, data = training_text(config).partition(" on ")
    what = f"{network if model is None else 'your network'} on {data if datasets is None else 'your data'}"
    names = ", ".join(methods) or config.run.method
    return shown(progress, Starting(program, f"{what} with {names}"), setting_text(config))


def _check_needs_no_losses(config: Config) -> None:
    """Raise if a timing-only run, which has no validation losses, is asked to use them."""
    for key, value in validated_keys(config).items():
        raise ConfigError(f"{key} = {value} needs validation losses, and a timing-only run has none: unset it.")


def _check_allowed(config: Config) -> None:
    """Raise if server.allow excludes a device of the configuration: on one machine no other can join in its place."""
    if config.server.allow is None:
        return
    names = AllowList(config.server.allow).names()
    for device in device_names(config):
        if device not in names:
            raise ConfigError(
                f"server.allow does not name '{device}', which is in [[devices]], so it could not take part: add it to "
                "server.allow, or remove it from [[devices]]."
            )


def _train(config: Config, world: World, own: tuple[Any, ...], options: RunOptions) -> Result:
    """Train with a checked configuration; `own` are the user's objects, in the order of `UserObjects.of`."""
    if world == "timing-only" and all(one is None for one in own):
        job = prepare_timing_only(config, rehearse, options.observe)
        if job is not None:
            return _run_timing_only(job, options)
    options.observe(Preparing(LOADING, 0.0))
    if world == "real":
        start_fork_server(own_optimizer=config.optimizer.kind == OWN)
    with uncollected():
        from pipar.job.user_objects import UserObjects  # imports torch, which a timing-only run does without

    return _run_with_torch(config, UserObjects.of(config, *own), world, options)


def compare(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    methods: Sequence[str] = ("fl", "sl", "sfl", "pipar"),
    **options: Any,
) -> Comparison:
    """Train with several methods, one after another, with the same configuration; return the results by method.

    `options` are those of `run`.

    >>> both = pipar.compare(methods=["fl", "pipar"], world="timing-only", settings=SMALL)
    >>> [row["method"] for row in both.rows()]
    ['fl', 'pipar']
    """
    resolved = _configuration(config, options.pop("settings", ()), options.get("datasets"))
    configs = {
        method: with_method(resolved, method) for method in methods
    }  # all are checked before the first one is trained
    progress, observe = options.pop("progress", None), options.pop("observe", ignore)
    own = {key: options.get(key) for key in ("model", "datasets")}
    with shown_as("compare", resolved, progress, configs, **own) as show:
        options |= {"progress": False, "observe": tell_all(show, observe)}
        return Comparison({method: run(changed, **options) for method, changed in configs.items()})


def with_method(config: Config, method: str) -> Config:
    """Return the configuration with another method, checked; the method is appended to a configured name."""
    name = f"{config.run.name}-{method}" if config.run.name else None
    run = config.run.model_copy(update={"method": known.method(method).name, "name": name})
    try:
        check_method(config.server.aggregator, known.method(method))
        changed = config.model_copy(update={"run": run})
        check_private_updates(changed)
        check_clipping(changed)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    return changed


def configuration_of(config: Any, settings: Sequence[str], datasets: Any, cut_points: Sequence[str] | None) -> Config:
    """Return the configuration of a call from Python: a file, dictionaries, a `Config` or None, with its overrides."""
    return _with_cut_points(_configuration(config, settings, datasets), cut_points)


def _configuration(config: Any, settings: Sequence[str], datasets: Any) -> Config:
    if isinstance(settings, str):
        raise ConfigError(f"settings is one string: give a list of them, as in settings=[{settings!r}].")
    if isinstance(config, Config):
        return with_settings(config, settings)
    if isinstance(config, str | Path):
        return load_config(Path(config), settings)
    tree: dict[str, Any] = dict(config or {})
    if "devices" not in tree and datasets is not None:
        tree |= _devices_for(datasets)
    return load_config(None, settings, tree)


def _with_cut_points(config: Config, cut_points: Sequence[str] | None) -> Config:
    if cut_points is None:
        return config
    model = {**config.model.model_dump(exclude_unset=True), "cut_points": cut_points}
    tree = {name: getattr(config, name) for name in config.model_fields_set}
    return config_from({**tree, "model": model})


def with_functions(
    config: Config, loss: Any = None, metrics: Mapping[str, Any] | None = None, optimizer: Any = None
) -> Config:
    """Return the configuration with the names of the functions that the user passed."""
    if not isinstance(metrics, Mapping | None):
        raise ConfigError(
            f"metrics is a {type(metrics).__name__}: give functions by name, as in metrics={{'error': error}}; those "
            "of pipar are named in task.metrics."
        )
    if loss is None and not metrics and optimizer is None:
        return config
    from pipar.job.passed_function import OWN, passed_name

    task, steps = (one.model_dump(exclude_unset=True) for one in (config.task, config.optimizer))
    if loss is not None:
        task["loss"] = passed_name(loss)
    task["metrics"] = [*config.task.metrics, *(f"{OWN}:{name}" for name in metrics or {})]
    if optimizer is not None:
        steps["factory"] = passed_name(optimizer)
    tree = {name: getattr(config, name) for name in config.model_fields_set}
    return config_from({**tree, "task": task, "optimizer": steps})


def _devices_for(datasets: Any) -> dict[str, Any]:
    """Return a [[devices]] section with one device for each dataset; nothing for a single dataset to partition."""
    from pipar.data.user_datasets import is_list_of_datasets  # imports torch

    if isinstance(datasets, Mapping):
        return {"devices": [{"name": name} for name in datasets]}
    return {"devices": [{"count": len(datasets)}]} if is_list_of_datasets(datasets) else {}


@dataclass(frozen=True)
class RunOptions:
    """What a run reports: its command in result.json, events to an observer, and an HTML report at the end."""

    command: str
    observe: Observer = ignore
    report: bool = False
    pictures: bool = False  # also send observers the lanes of each epoch
    record: bool = False  # write a recording, for `pipar replay`
    callbacks: Callbacks = field(default_factory=lambda: Callbacks(()))
    programs: bool = False  # that time a timing-only run, in any case

    def epoch_recorder(self, folder: RunFolder) -> Callable[[EpochResult, list[Span]], None]:
        """Return a function that records an epoch in the folder and passes it on to the observer."""
        return folder.epoch_recorder(self.observe, pictures=self.pictures)


def _run_timing_only(job: Job, options: RunOptions) -> Result:
    # They import numpy, without which commands start faster.
    from pipar.launch.simulated import simulate_training, why_programs
    from pipar.launch.virtual import train_timing_only

    should_stop = options.callbacks.should_stop
    # Before the run starts: a simulation that has to show it is part of the preparation.
    why = (
        "" if options.programs else why_programs(job, options.observe, should_stop=should_stop, recorded=options.record)
    )
    train = train_timing_only if options.programs or why else simulate_training
    with _open_folder(job, options, "timing-only") as path:
        folder = RunFolder(path, job, world="timing-only", command=options.command)
        try:
            with recorded(folder, world="timing-only", is_on=options.record) as (emitting, watching):
                emit, watch = emitting(options.epoch_recorder(folder)), watching(folder.event_recorder(options.observe))
                if why:
                    watch(TimedByPrograms(why))
                train(job, emit, watch, accountant=folder.accountant, should_stop=should_stop)
        finally:  # the epochs so far are kept, even if it is interrupted
            content = save_result(folder, without_signals(folder.finish), options.observe)
        return Result(path, content)


def _run_with_torch(config: Config, own: UserObjects, world: World, options: RunOptions) -> Result:
    from pipar.job.torch_devices import check_torch_devices  # imports torch
    from pipar.job.workload import Workload

    if world == "real":
        _check_real_world(config)
    if world != "timing-only":
        check_torch_devices(config)
    workload = Workload(config, own)
    job = prepare(workload, rehearse, options.observe, shares_machine=world == "real")
    if world == "timing-only":
        return _run_timing_only(job, options)
    if world == "virtual":
        return _run_virtual(job, workload, options)
    return _run_real(job, workload, options)


def _run_virtual(job: Job, workload: Workload, options: RunOptions) -> Result:
    from pipar.job.model_setup import make_learner, scores_on_test_set  # imports torch
    from pipar.launch.virtual import train_virtually

    learner = make_learner(job, workload)
    with _open_folder(job, options, "virtual") as path:
        folder = RunFolder(path, job, world="virtual", command=options.command)
        try:
            with recorded(folder, world="virtual", is_on=options.record) as (emitting, watching):
                emit, watch = emitting(options.epoch_recorder(folder)), watching(folder.event_recorder(options.observe))
                train_virtually(
                    job,
                    workload,
                    emit,
                    watch,
                    learner,
                    accountant=folder.accountant,
                    best=folder.best,
                    should_stop=options.callbacks.should_stop,
                )
        finally:  # the epochs so far and the last global model are kept, even if it is interrupted
            save_result(folder, without_signals(final_files(folder, learner, options.observe)), options.observe)
        scores = scores_on_test_set(learner, workload)
        last = without_signals(partial(folder.add_test_scores, scores))
        return Result(path, save_result(folder, last, options.observe), workload.network)


def _run_real(job: Job, workload: Workload, options: RunOptions) -> Result:
    from pipar.launch.processes import train_in_processes  # imports torch

    with _open_folder(job, options, "real") as folder:
        what = (options.command, options.observe)
        train_in_processes(
            job,
            workload.for_processes(),
            folder,
            *what,
            pictures=options.pictures,
            record=options.record,
            should_stop=options.callbacks.should_stop,
        )
        content = json.loads((folder / "result.json").read_text("utf-8"))
        return Result(folder, content, workload.network)


def _check_real_world(config: Config) -> None:
    """Raise if real processes cannot have the configured speeds, or the server cannot listen on its address."""
    from pipar.launch.processes import check_address  # imports torch

    fast = [(spec.name, spec.speed) for spec in device_specs(config) if spec.speed > 1]
    fast += [("the server", config.server.speed)] if config.server.speed > 1 else []
    for name, speed in fast:
        raise ConfigError(
            f"{name} has speed {speed:g}, but real processes cannot be faster than this machine: give a speed of at "
            "most 1, or use --virtual."
        )
    check_address(config.server.listen)


@contextmanager
def _open_folder(job: Job, options: RunOptions, world: World) -> Iterator[Path]:
    """Make the run's folder and report that training starts; at the end, write the HTML report if it is asked for.

    A run that fails before the end of its first epoch leaves no folder.
    """
    folder = new_folder(run_name(job.config, job.model, job.dataset))
    options.observe(started_event(job, folder, world))
    try:
        with folder_locked(folder, options.command):
            yield folder
    except KeyboardInterrupt:
        if not (folder / "result.json").exists():
            remove_if_no_epochs(folder)
        _write_report(folder, options, None)  # without its what-if part, which would take time after Ctrl-C
        raise
    except Exception:
        remove_if_no_epochs(folder)
        _write_report(folder, options, None)
        raise
    _write_report(folder, options, job)


def _write_report(folder: Path, options: RunOptions, job: Job | None) -> None:
    if options.report and (folder / "metrics.jsonl").exists():
        from pipar.report import try_write_report  # only few runs need it

        try_write_report(folder, options.observe, job=job)


def started_event(job: Job, folder: Path, world: World = "real") -> Started:
    """Return the event that reports the start of a training."""
    run = job.config.run
    return Started(
        folder=str(folder),
        method=run.method,
        epochs=run.epochs,
        cores=job.cores,
        plans={name: str(plan) for name, plan in sorted(job.plans.items())},
        samples=dict(job.sizes),
        iterations={name: sum(job.batch_counts(size).values()) for name, size in job.sizes.items()},
        local_epochs=run.local_epochs,
        world=world,
        is_private=job.update_noise is not None,
        metric=next(map(shown_name, job.config.task.metrics), ""),
        leakage=_leakage_text(job),
        equivalence_reasons=equivalence_reasons(job.equivalence_facts),
        layers=job.layers,
        threads={name: job.threads(name) for name in job.device_profiles},
    )


def _leakage_text(job: Job) -> str:
    most = job.config.privacy.max_leakage
    if most is None or not job.method.splits:
        return ""
    return f"{ruled_out_text(most, job.leaky_cuts)}. {guess_text(most, job.leakage_guess)}".strip()
