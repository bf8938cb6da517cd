"""Records the flight of a training while it runs: after every round its times, and events as they come.

The event loop only notes what it knows. The writer's thread computes, compresses and appends.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipar.errors import ConfigError
from pipar.events import (
    Away,
    Back,
    BudgetSpent,
    Dropped,
    EndedByCallback,
    EpochResult,
    Event,
    Heard,
    Joined,
    Left,
    Lost,
    Observer,
    Refused,
    ReplanFailed,
    Replanned,
    Resumed,
    RoundOver,
    RoundRestarted,
    SaveFailed,
    Silent,
    Stopping,
    Waiting,
)
from pipar.execution.spans import COMPUTE, EVALUATION, IO, SERVER, Span
from pipar.job.job import Job
from pipar.methods import Plan
from pipar.profiling.cache import machine_fingerprint
from pipar.profiling.machines import MACHINES
from pipar.recording import flight
from pipar.recording.micro_batch_sizes import Places
from pipar.recording.stage_times import DeviceModel, LinkModel, RoundTimes, Sent, Sizes, stage_times, times_to_json
from pipar.recording.writer import RecordWriter, profile_record
from pipar.settings.config import Config, device_names
from pipar.settings.config_file import dump_config
from pipar.settings.links import Link
from pipar.storage.run_folder import RunFolder, versions
from pipar.storage.whole_files import cannot_write
from pipar.transport.shaping import Rates
from pipar.wire.messages import LABELS

FILE = "flight.jsonl.zst"
Emit = Callable[[EpochResult, list[Span]], None]
#: What wraps the functions that get a training's epochs and its events, so that both are recorded.
Recording = tuple[Callable[[Emit], Emit], Callable[[Observer], Observer]]

#: Events that are recorded. Reports of progress, files and certificates are not.
_RECORDED = (
    Joined, Away, Back, Lost, Left, Dropped, RoundRestarted, Replanned, ReplanFailed, RoundOver, Refused, Silent, Heard,
    Waiting, BudgetSpent, EndedByCallback, Resumed, Stopping,
)  # fmt: skip
#: How reasons begin that are the server's own words and numbers. What follows, and any other reason, may name addresses
#: and paths, and may come from a peer.
_OWN_WORDS = re.compile(
    "it missed the deadline of # s|it has not finished after # s, much longer than expected|it has left|"
    "its link was lost for more than # s|it was started again, or another device uses its name|"
    "it has not acknowledged the messages of several rounds|it broke the protocol|it ended its session|"
    "its credential was revoked|This certificate was revoked|Its token was revoked".replace(
        "#", r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
    )
)


class FlightRecorder:
    """Records one training into a new file of its run's folder."""

    def __init__(self, folder: RunFolder, *, world: str) -> None:
        self._folder = folder
        self._path = _new_path(folder.path)
        self._plans: dict[int, Mapping[str, Plan]] = {}  # by the first round that they apply to
        self._joined: dict[str, float] = {}  # when the current session of each device began
        self._released: deque[float] = deque(maxlen=1000)  # when the server gave up devices
        self._computed_until: dict[str, float] = {}  # by device, in the last round; used by the thread only
        self._writer = RecordWriter(self._path, can_wait=world != "real")
        self._has_clock = False
        self._reported: OSError | None = None
        self._writer.put(partial(_header, folder.job, world))
        self._writer.put(partial(profile_record, 0, folder.job.server_profile))

    def emit_with(self, emit: Emit) -> Emit:
        """Return a function that records an epoch, and passes it on."""

        def record(result: EpochResult, spans: list[Span]) -> None:
            self._add_round(result, spans)
            emit(result, spans)

        return record

    def watch_with(self, observe: Observer) -> Observer:
        """Return an observer that records events, and passes all of them on."""

        def watch(event: Event) -> None:
            if isinstance(event, _RECORDED):
                self._add_event(event)
            observe(event)
            failure = self._writer.failure
            if failure is not None and self._reported is None:
                reason = cannot_write(str(self._path), failure)
                observe(
                    SaveFailed(len(self._folder.round_log), f"{reason} The recorder tries again with its next record.")
                )
            self._reported = failure

        return watch

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._writer.close()

    def _add_event(self, event: Event) -> None:
        now = self._now()
        if isinstance(event, Joined):
            self._joined[event.device] = now
        elif isinstance(event, Dropped | Lost):
            self._released.append(now)
        elif isinstance(event, Replanned):
            self._plans[event.epoch] = {name: Plan(**plan) for name, plan in event.plans.items()}
        self._writer.put(partial(_event_record, now, event, self._folder.job.sizes))

    def _add_round(self, result: EpochResult, spans: list[Span]) -> None:
        self._now()
        job = self._folder.job
        known = _KnownRound(job, self._plans_of(result.epoch, job), dict(self._joined), list(self._released))
        self._writer.put_round(job, partial(self._round_record, known, result, spans))

    def _round_record(self, known: _KnownRound, result: EpochResult, spans: list[Span]) -> dict[str, Any]:
        before = self._computed_until
        self._computed_until = {}
        for span in spans:
            if span.lane == COMPUTE and not span.waiting:
                self._computed_until[span.owner] = max(span.end, self._computed_until.get(span.owner, span.end))
        return _round_record(known, before, result, spans)

    def _plans_of(self, epoch: int, job: Job) -> Mapping[str, Plan]:
        firsts = [first for first in self._plans if first <= epoch]
        for old in sorted(firsts)[:-1]:
            del self._plans[old]
        return {**job.plans, **(self._plans[max(firsts)] if firsts else {})}

    def _now(self) -> float:
        now = asyncio.get_running_loop().time()
        if not self._has_clock:
            self._has_clock = True
            self._writer.put(lambda: {"is": flight.CLOCK, "at": now, "utc": round(time.time(), 3)})
        return now


@contextmanager
def recorded(folder: RunFolder, *, world: str, is_on: bool) -> Iterator[Recording]:
    """Yield what records a training into its folder until the end of the block; nothing is recorded unless `is_on`."""
    if not is_on:
        yield lambda emit: emit, lambda observe: observe
        return
    recorder = FlightRecorder(folder, world=world)
    try:
        yield recorder.emit_with, recorder.watch_with
    finally:
        recorder.close()


def check_can_record(config: Config) -> None:
    """Raise ConfigError if a training would keep no spans, of which a recording is made."""
    if config.run.trace == "off":
        raise ConfigError(
            "run.trace = 'off' keeps no times of stages, which --record needs: set it to 'auto' or 'full'."
        )


def _new_path(folder: Path) -> Path:
    """Return a file that does not exist yet: each start of a server has its own clock, and its own file."""
    path, number = folder / FILE, 1
    while path.exists():
        number += 1
        path = folder / f"flight-{number}.jsonl.zst"
    return path


# --- records


def _header(job: Job, world: str) -> dict[str, Any]:
    config, noise = job.config, job.update_noise
    return {
        "is": flight.HEADER,
        "format": flight.FORMAT,
        "pipar": versions()["pipar"],
        "versions": versions(),
        "machine": machine_fingerprint(),
        "world": world,
        "model": job.model,
        "dataset": job.dataset,
        "cores": job.cores,
        "batch_statistics": job.batch_statistics,
        "sample_bytes": job.sample_bytes,
        **({"steady_layers": job.steady_layers} if job.steady_layers else {}),
        **({} if job.target_size == LABELS else {"targets": asdict(job.target_size)}),
        "noise_multiplier": 0.0 if noise is None else noise.multiplier,
        "min_devices": config.server.min_devices or len(job.specs) or len(device_names(config)),
        "configuration": dump_config(public_config(config)),
        "profile": 0,
    }


def public_config(config: Config) -> Config:
    """Return a configuration without paths, addresses, and names of devices that do not train."""
    groups = tuple(
        group.model_copy(update={"profile": group.profile if group.profile in MACHINES else None})
        for group in config.devices
    )
    server = config.server.model_copy(
        update={
            "profile": config.server.profile if config.server.profile in MACHINES else None,
            "listen": type(config.server)().listen,
            "allow": None,
        }
    )
    privacy = config.privacy.model_copy(update={"leakage": None, "max_leakage": None})
    data = config.data.model_copy(update={"path": None})
    return config.model_copy(update={"devices": groups, "server": server, "privacy": privacy, "data": data})


def _event_record(now: float, event: Event, devices: Container[str]) -> dict[str, Any]:
    """Return an event without texts that may name addresses and paths.

    Of its reason it has only the server's own words. A refused name is recorded only if it is that of a device.
    """
    about = {key: value for key, value in asdict(event).items() if value not in ("", None)}
    if "reason" in about and (own := _OWN_WORDS.match(about.pop("reason"))):
        about["reason"] = own[0]
    if isinstance(event, Refused) and event.device not in devices:
        about.pop("device", None)
    return {"is": flight.EVENTS, "events": [[round(now, 6), type(event).__name__, about]]}


@dataclass(frozen=True)
class _KnownRound:
    """What the event loop knows of a round."""

    job: Job
    plans: Mapping[str, Plan]
    joined: Mapping[str, float]
    released: list[float]

    def models(
        self, names: set[str], computed_until: Mapping[str, float], result: EpochResult
    ) -> dict[str, DeviceModel]:
        job, run = self.job, self.job.config.run
        cut = {"batch_statistics": job.batch_statistics, "passes": run.local_epochs}
        models = {}
        for name in sorted(names & job.links.keys() & self.plans.keys()):
            pieces = self.plans[name].micro_batches
            places = Places.of(job.sizes[name], pieces, run.batch_size, **cut)
            since = self.joined.get(name, 0.0)
            up, down = link_models(job.links[name], since)
            if name in result.device_bytes and not (up.is_limited or down.is_limited):
                up, down = self._measured(name, result)
            models[name] = DeviceModel(places, up, down, computed_until.get(name))
        return models

    def _measured(self, name: str, result: EpochResult) -> tuple[LinkModel, LinkModel]:
        """Return a link that is not emulated, with the rates and bytes that the round has shown."""
        models, plan, profile = [], self.plans[name], self.job.server_profile
        samples, whole = self.job.sizes[name], profile.changing_bytes(1, plan.split_point)
        rates = [_readable(rate) for rate in result.device_rates.get(name, [None, None])]
        for way, (total, rate) in enumerate(zip(result.device_bytes[name], rates, strict=True)):
            coding, labels = (plan.down, 0) if way else (plan.up, self.job.target_size.sample_bytes)
            splits = plan.split_point < self.job.layers
            at_cut = (profile.gradient_bytes if way else profile.output_bytes)(plan.split_point)
            raw = samples * (at_cut + labels) if splits else 0
            # What is not tensors is the model, whole or its changes; if tensors are coded, it is taken to be whole.
            model = min(whole, max(0, total - raw)) if coding == "raw" else min(whole, total)
            tensors = max(0, total - model) if splits else 0
            sizes = Sizes(min(tensors, raw) / samples if samples else 0.0, model)
            models.append(LinkModel(Rates((rate,)), 0.0, sizes, Sent(round(min(tensors, raw)), model)))
        return models[0], models[1]


def _readable(rate: float | None) -> float | None:
    """Return the nearest rate that may be in a file; a device may claim any."""
    return None if rate is None else min(max(flight.LEAST_BPS, rate), flight.LARGEST_BPS)


def link_models(link: Link, since: float) -> tuple[LinkModel, LinkModel]:
    """Return the two directions of a link whose cycle, if it has one, began at a time."""
    models = []
    for way in ("up_bps", "down_bps"):
        cycle = tuple(getattr(one, way) for one in link.cycle)
        rates = Rates(cycle, link.every_s, since) if cycle else Rates((getattr(link, way),))
        models.append(LinkModel(rates, link.latency_s))
    return models[0], models[1]


def _round_record(
    known: _KnownRound, computed_until: Mapping[str, float], result: EpochResult, spans: list[Span]
) -> dict[str, Any]:
    spans = [span for span in spans if span.lane != EVALUATION]  # between rounds, which a replay leaves out
    names = {span.owner for span in spans} | {span.device for span in spans if span.device}
    models = known.models(names - {SERVER}, computed_until, result)
    times = stage_times(spans, models, known.released, shares_model=known.job.method.shares_server_model)
    loads = [span.start for span in spans if span.lane == IO and span.kind == "load" and not span.waiting]
    start = round(min(loads, default=0.0), 9)
    about = ("samples", "bytes_up", "bytes_down", "validation_s", "devices")
    return {
        "is": flight.ROUND,
        "round": result.epoch,
        "start": start,
        "seconds": result.seconds,
        "plans": {name: asdict(plan) for name, plan in sorted(known.plans.items()) if name in known.job.links},
        "about": {key: getattr(result, key) for key in about},
        "rates": {name: model.measured_bps for name, model in models.items() if model.measured_bps},
        **times_record(times),
        "begun": {name: [round(1000 * (time - start)) for time in begun] for name, begun in times.begun.items()},
    }


def times_record(times: RoundTimes) -> dict[str, Any]:
    """Return the times of a round as its record has them."""
    numbers = {name: number for number, name in enumerate(times.serving)}
    return {
        "devices": {name: times_to_json(own) for name, own in times.devices.items()},
        "serving": {name: times_to_json(own) for name, own in times.serving.items()},
        "server": times_to_json(times.server),
        "up": {name: [sent.tensor_bytes, sent.model_bytes] for name, sent in times.up.items()},
        "down": {name: [sent.tensor_bytes, sent.model_bytes] for name, sent in times.down.items()},
        "order": [numbers[name] for name in times.order],
    }
