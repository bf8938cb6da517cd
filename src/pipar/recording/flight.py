"""The records of a flight, and a recorded training read back from its file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pipar.errors import ConfigError, InputError, PiparError
from pipar.job.job import Job
from pipar.json_records import is_number, is_whole
from pipar.methods import Plan, check_plan
from pipar.profiling.profile import Profile
from pipar.recording.frames import read_records
from pipar.recording.stage_times import RoundTimes, Sent, read_times
from pipar.settings.config import Config, DeviceSpec, drawn_devices
from pipar.settings.config_file import config_from
from pipar.settings.links import Link, parse_link
from pipar.wire import encodings
from pipar.wire.messages import LABELS, TargetSize

#: Written into every file; a file of another format is refused.
FORMAT = 2
HEADER, CLOCK, PROFILE, DEVICE, EVENTS, ROUND = "pipar flight", "clock", "profile", "device", "events", "round"
END = "end"  # of a recorder that was closed, with the CPU time that it took

#: Bits per second that a link may have had; a device may claim other ones, of which the nearest is recorded.
LEAST_BPS, LARGEST_BPS = 1.0, 1e12
_LARGEST_S = 1e12
_MOST_COUNT = 1 << 31
#: More would take too long to replay, or too much memory.
_MOST_MICRO_BATCHES = 5_000_000
_MOST_CORES = 100_000
#: Rounds that may be missing, because the disk was full or slow, besides a part of all of them.
_MOST_MISSING = 100


@dataclass(frozen=True)
class RecordedEvent:
    """An event of the server at a time on its clock: the name of its class, and its fields."""

    at: float
    what: str
    about: Mapping[str, Any]

    @property
    def device(self) -> str:
        return str(self.about.get("device", ""))


@dataclass(frozen=True)
class RecordedRound:
    """A complete round: when its first device began, what it took, its plans, and the times of its work."""

    number: int
    start: float
    seconds: float
    plans: Mapping[str, Plan]
    times: RoundTimes
    about: Mapping[str, Any] = field(default_factory=dict)  # samples, bytes and validation time
    rates: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)  # of links, if measured

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True)
class Flight:
    """A recorded training."""

    job: Job  # without the data and the network itself; its plans are those of the first round
    header: Mapping[str, Any]
    events: tuple[RecordedEvent, ...]
    rounds: tuple[RecordedRound, ...]
    utc_offset_s: float | None  # what to add to a time on the server's clock
    unread_bytes: int = 0  # at the end of the file
    recorder_cpu_s: float | None = None  # what recording took; None if the recorder was not closed

    @property
    def first_round(self) -> int:
        return self.rounds[0].number

    def epoch_of(self, one: RecordedRound) -> int:
        """Return the number of a round, counted from the first recorded one."""
        return one.number - self.first_round + 1

    def joined_at(self, device: str) -> float:
        """Return when a device joined first; before the first round if it is not recorded."""
        return next((e.at for e in self.events if e.what == "Joined" and e.device == device), self.rounds[0].start)

    @classmethod
    def read(cls, path: Path) -> Flight:
        """Return the training in a file, or raise an InputError of one sentence."""
        if path.is_dir():
            raise InputError(f"{path} is a folder: give the file of a recording, as in {path}/flight.jsonl.zst.")
        records, unread = read_records(path)
        if not records or records[0].get("is") != HEADER:
            raise InputError(f"{path} is not a recording of `pipar server --record` or `pipar run --record`.")
        if records[0].get("format") != FORMAT:
            by = str(records[0].get("pipar", "another version"))[:40]
            raise InputError(
                f"{path} has format {str(records[0].get('format'))[:20]}, written by pipar {by}; this version reads "
                f"format {FORMAT} only: install the version that wrote it."
            )
        try:
            return _Reader(records).flight(unread)
        except (PiparError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            why = str(error).splitlines()[0][:200].rstrip(".") if str(error) else type(error).__name__
            raise InputError(f"{path} is not what the recorder writes, maybe damaged: {why}.") from None


class _Reader:
    """Turns the records of a file into a training."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self._header = records[0]
        self._profiles: dict[int, Profile] = {}
        self._devices: dict[str, tuple[DeviceSpec, int, Profile]] = {}
        self._events: list[RecordedEvent] = []
        self._rounds: dict[int, RecordedRound] = {}
        self._utc_offset_s: float | None = None
        self._cpu_s: float | None = None
        for record in records[1:]:
            self._take(record)

    def _take(self, record: Mapping[str, Any]) -> None:
        match record["is"]:
            case "clock":
                self._utc_offset_s = _number(record["utc"], -_LARGEST_S) - _number(record["at"])
            case "profile":
                self._profiles[record["number"]] = Profile.from_json(record["profile"])
            case "device":
                self._take_device(record)
            case "events":
                self._events += [
                    RecordedEvent(_number(at), str(what), dict(about)) for at, what, about in record["events"]
                ]
            case "round":
                self._take_round(record)
            case "end":
                self._cpu_s = _number(record["cpu_s"])
            case other:
                raise ValueError(f"it has a record '{str(other)[:40]}', which is unknown")

    def _take_device(self, record: Mapping[str, Any]) -> None:
        link = parse_link(record["link"])
        assert isinstance(link, Link)
        speed = _number(record["speed"], 1e-9)
        spec = DeviceSpec(str(record["name"]), link, speed, None, "auto", "auto", None)
        self._devices[spec.name] = (spec, _whole(record["samples"]), self._profiles[record["profile"]])

    def _take_round(self, record: Mapping[str, Any]) -> None:
        number = _whole(record["round"])
        plans = {name: read_plan(plan) for name, plan in _object(record["plans"], self._devices).items()}
        start, seconds = _number(record["start"], -_LARGEST_S), _number(record["seconds"])
        times = RoundTimes(
            devices={name: read_times(tree) for name, tree in _object(record["devices"], plans).items()},
            serving={name: read_times(tree) for name, tree in _object(record["serving"], plans).items()},
            server=read_times(record["server"]),
            up={name: _sent(sent) for name, sent in _object(record["up"], plans).items()},
            down={name: _sent(sent) for name, sent in _object(record["down"], plans).items()},
            order=_order(record["order"], list(record["serving"])),
            begun={name: _times_after(start, value) for name, value in _object(record["begun"], plans).items()},
        )
        rates = {name: _rates(value) for name, value in _object(record["rates"], plans).items()}
        self._rounds[number] = RecordedRound(number, start, seconds, plans, times, dict(record["about"]), rates)

    def flight(self, unread_bytes: int) -> Flight:
        if not self._rounds:
            raise ConfigError("it has no complete round, so there is nothing to replay")
        if max(self._rounds) - min(self._rounds) > 2 * len(self._rounds) + _MOST_MISSING:
            raise ValueError("most of its rounds are missing")
        rounds = tuple(self._rounds[number] for number in sorted(self._rounds))
        events = tuple(sorted(self._events, key=lambda event: event.at))
        return Flight(self._job(rounds), self._header, events, rounds, self._utc_offset_s, unread_bytes, self._cpu_s)

    def _job(self, rounds: tuple[RecordedRound, ...]) -> Job:
        header = self._header
        profile = self._profiles[header["profile"]]
        config = _replayed_config(header, len(self._devices), rounds[-1].number - rounds[0].number + 1)
        plans: dict[str, Plan] = {}
        for one in reversed(rounds):  # a device that joined late has the plan of its first round
            plans |= one.plans
        for name, plan in plans.items():
            check_plan(plan, layers=len(profile.layers), batch_size=_MOST_MICRO_BATCHES, model=name)
            batches = math.ceil(self._devices[name][1] / config.run.batch_size)
            if batches * plan.micro_batches > _MOST_MICRO_BATCHES:
                raise ValueError(f"'{name[:40]}' has more than {_MOST_MICRO_BATCHES} micro-batches in a round")
        devices = sorted(self._devices.items())
        return Job(
            config=config,
            specs=tuple(spec for _, (spec, _, _) in devices if spec.name in plans),
            sizes={name: samples for name, (_, samples, _) in devices if name in plans},
            server_profile=profile,
            device_profiles={name: own for name, (_, _, own) in devices if name in plans},
            batch_statistics=bool(header["batch_statistics"]),
            dropout=False,
            plans=plans,
            dataset=str(header["dataset"]),
            model=str(header["model"]),
            sample_bytes=_whole(header["sample_bytes"]),
            steady_layers=_whole(header.get("steady_layers", 0)),
            target_size=_target_size(header.get("targets")),
        )


def _target_size(content: Any) -> TargetSize:
    """Return the bytes of targets in messages; a recording without them has labels."""
    if content is None:
        return LABELS
    return TargetSize(_whole(content["sample_bytes"]), _whole(content["message_bytes"]))


#: What the messages of a training depend on.
_OF_RUN = ("method", "batch_size", "local_epochs", "trace")


def _replayed_config(header: Mapping[str, Any], devices: int, rounds: int) -> Config:
    """Return what the replay needs of the recorded configuration: nothing that refers to files or code."""
    tree = tomllib.loads(header["configuration"])
    run, server, privacy = tree["run"], tree["server"], dict(tree.get("privacy", {}))
    noise, drawn = header["noise_multiplier"], run.get("devices_per_round", "all")
    if isinstance(drawn, int):
        drawn = max(1, min(drawn, devices))  # fewer may have come than were configured
    wanted = {"clip": privacy.get("clip", 1.0), "pixel_epsilon": privacy.get("pixel_epsilon")}
    wanted |= {"noise_multiplier": noise or None}
    return config_from(
        {
            "run": {**{key: run[key] for key in _OF_RUN if key in run}, "epochs": rounds, "devices_per_round": drawn},
            "model": {"dtype": tree["model"]["dtype"]},
            "optimizer": _replayed_optimizer(tree["optimizer"]),
            "plan": {"replan": False, "schedule": tree["plan"]["schedule"], "window": tree["plan"]["window"]},
            "wire": {"encoding": tree["wire"]["encoding"]},
            "server": {
                "cores": min(_MOST_CORES, _whole(header["cores"])),
                "speed": server["speed"],
                "round_deadline": server.get("round_deadline", "auto"),
                "min_devices": min(_whole(header["min_devices"]), drawn_devices(drawn, devices) or 1),
                # A replay ends the session of a lost device when the server did.
                "resume_window": 0.0,
            },
            "privacy": {key: value for key, value in wanted.items() if value is not None},
            "devices": [{"count": max(1, devices)}],
        }
    )


def _replayed_optimizer(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return what changes the messages of a training."""
    return {key: section[key] for key in ("state_at_aggregation", "clip_norm", "clip") if key in section}


def read_plan(tree: Mapping[str, Any]) -> Plan:
    """Return a plan from its fields, or raise ValueError."""
    plan = Plan(**{one.name: tree[one.name] for one in fields(Plan)})
    numbers = (plan.split_point, plan.micro_batches, plan.window)
    if not all(is_whole(one, 0, _MOST_COUNT) for one in numbers) or not {plan.up, plan.down} <= set(encodings.ALL):
        raise ValueError(f"{str(tree)[:80]} is not a plan")
    return plan


def _object(value: Any, names: Container[str]) -> dict[str, Any]:
    """Return an object whose keys are some of these devices."""
    if not isinstance(value, dict):
        raise ValueError("a list of devices is not an object")
    unknown = [name for name in value if name not in names]
    if unknown:
        raise ValueError(f"'{unknown[0][:40]}' is not one of its devices")
    return value


def _rates(value: Any) -> tuple[float | None, float | None]:
    up, down = (None if one is None else _number(one, LEAST_BPS, LARGEST_BPS) for one in value)
    return up, down


def _sent(value: Any) -> Sent:
    tensor_bytes, model_bytes = value
    return Sent(_whole(tensor_bytes), _whole(model_bytes))


def _order(value: Any, names: Sequence[str]) -> list[str]:
    """Return the names of devices by their numbers."""
    if not isinstance(value, list) or not all(is_whole(number, 0, len(names) - 1) for number in value):
        raise ValueError("the order of its micro-batches is not a list of its devices")
    return [names[number] for number in value]


def _times_after(start: float, value: Any) -> list[float]:
    """Return times that are given in milliseconds after another one."""
    most = 1000 * _LARGEST_S
    return [start + _number(milliseconds, -most, most) / 1000 for milliseconds in value]


def _number(value: Any, least: float = 0.0, most: float = _LARGEST_S) -> float:
    if not is_number(value, least, most):
        raise ValueError(f"{str(value)[:40]} is outside {least:g}..{most:g}")
    return float(value)


def _whole(value: Any) -> int:
    if not is_whole(value, 0, 1 << 62):
        raise ValueError(f"{str(value)[:40]} is not a count")
    return value
