"""Everything that the page shows about one run, or several side by side, as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from pipar.execution.spans import COMPUTE, DOWNLINK, UPLINK, slowest_to_fastest
from pipar.methods import METHODS
from pipar.planner.timing import LANES
from pipar.report.record import RunRecord, configured, shown_epoch
from pipar.report.timeline import MOST_SPANS, EpochTrace, epoch_timeline, iteration_timeline
from pipar.settings.config import Config, DeviceSection, DeviceSpec, device_specs
from pipar.settings.wording import (
    equivalence_text,
    link_text,
    plan_text,
    plans_text,
    privacy_text,
    setting_text,
    statistical_mark,
    whole_network_text,
)
from pipar.storage.device_table import device_rows, value_names
from pipar.storage.run_json import plan_from_json

#: Devices whose lanes are drawn: in the report of one run, and per run in a comparison.
_DRAWN_ALONE, _DRAWN_COMPARED = 4, 2
#: Spans of all timelines of a page, which keep it below 3 MB.
_THIS_MACHINE = "this machine"
_MOST_DRAWN = 16_000
_MOST_DEVICES = 60
#: Epochs of one run, and of all runs of a comparison: these also keep a page below 3 MB.
_MOST_EPOCHS, _MOST_EPOCHS_IN_ALL = 400, 1000
_WORLDS = {
    "real": "real processes",
    "virtual": "virtual time",
    "timing-only": "virtual time, timing only",
}
_EPOCH_KEYS = (
    "epoch", "seconds", "predicted_s", "samples", "train_loss", "val_loss", "val_accuracy", "bytes_up", "bytes_down",
    "server_idle_s", "device_idle_s", "bound_s", "efficiency", "devices",
)  # fmt: skip
#: Runs that differ in one of these are not comparable: their times say nothing about their methods.
_SAME_TRAINING = ("model", "dataset", "world", "setting", "server")


def content(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the content of the page as JSON values; of several records, a comparison."""
    names = _names(records)
    traced = [_traced(record) for record in records]
    drawn = _drawn_devices(traced, _DRAWN_ALONE if len(records) == 1 else _DRAWN_COMPARED)
    most = min(MOST_SPANS, _MOST_DRAWN // (2 * max(1, len(records))))
    runs: list[dict[str, Any]] = []
    like: int | None = None  # all runs show the same iteration as the first, if they have it
    for name, record, spans, devices in zip(names, records, traced, drawn, strict=True):
        timelines = _timelines(record, spans, devices, like, most)
        like = like or (timelines["iteration"] or {}).get("iteration")
        runs.append({**_run(name, record, spans), **_shown_epochs(record, len(records)), "timeline": timelines})
    for run in runs:
        run["speedups"] = _speedups(run, runs)
    first = runs[0] if runs else None
    return {
        "title": _title(runs),
        "runs": runs,
        "running": any(record.running for record in records),
        "accuracy_is_equal": _is_equal(runs),
        "pipar": first["versions"].get("pipar") if first else None,
    }


# --- names, titles


def _names(records: Sequence[RunRecord]) -> list[str]:
    """Return distinct names of the runs: their methods, or their folders if methods repeat."""
    methods = [str(record.result.get("method", "run")) for record in records]
    if len(set(methods)) == len(methods):
        return methods
    folders = [record.folder.rstrip("/").rpartition("/")[2] or "run" for record in records]
    if len(set(folders)) == len(folders):
        return folders
    return [f"{name} ({number})" for number, name in enumerate(folders, start=1)]


def _title(runs: Sequence[Mapping[str, Any]]) -> str:
    if not runs:
        return "No run"
    what = dict.fromkeys(f"{run['model']} on {run['dataset']}" for run in runs)
    return f"{', '.join(what)}: {', '.join(run['name'] for run in runs)}"


def _is_equal(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all runs have the same test accuracy."""
    tested = {run["test_accuracy"] for run in runs}
    return len(runs) > 1 and len(tested) == 1 and None not in tested


# --- one run


def _run(name: str, record: RunRecord, traced: EpochTrace | None) -> dict[str, Any]:
    result, config, epochs = record.result, configured(record), _epochs(record)
    method = METHODS.get(str(result.get("method")))
    return {
        "name": name,
        "method": result.get("method"),
        "method_title": method.title if method else "",
        "model": result.get("model"),
        "dataset": result.get("dataset"),
        "world": _WORLDS.get(str(result.get("world"))),
        "learns": result.get("world") != "timing-only",
        "running": record.running,
        "folder": record.folder,
        "seed": result.get("seed"),
        "equivalence": equivalence_text(result),
        "mark": statistical_mark(result),
        "privacy": privacy_text(result, config),
        "epsilon": result.get("epsilon") or _last(epochs, "epsilon"),
        "stopped": result.get("stopped"),
        "command": result.get("command"),
        "machine": result.get("machine"),
        "versions": dict(result.get("versions") or {}),
        "setting": setting_text(_regrouped(config)) if config else None,
        "server": _server_text(config),
        "is_traced": config is None or config.run.trace != "off",
        "batch_size": config.run.batch_size if config else None,
        **(_training_texts(config) if config else {}),
        "plan": _plans_text(_plans_in_force(result, 1), result),
        "whole": _whole_text(result),
        "replans": [
            {
                "epoch": again["epoch"],
                "plan": _plans_text(again.get("plans", ()), result),
                "reason": str(again.get("reason") or ""),
            }
            for again in result.get("replans", ())
            if again["epoch"] > 1  # a deployment is planned again once its devices have joined
        ],
        **_averages(epochs),
        "test_accuracy": result.get("test_accuracy"),
        "val_accuracy": _last(epochs, "val_accuracy"),
        "metrics": result.get("test_metrics") or (epochs[-1].get("val_metrics") if epochs else None) or {},
        "is_tested": bool(result.get("test_metrics")),
        "train_loss": _last(epochs, "train_loss"),
        "evaluation": _evaluation(result, epochs),
        "devices": _devices(record, config, traced, _seconds_of(record, traced)),
        "outlook": dict(record.outlook) if record.outlook else None,
    }


def _epochs(record: RunRecord) -> list[Mapping[str, Any]]:
    return [epoch for epoch in record.result.get("epochs", ()) if isinstance(epoch, Mapping)]


def _shown_epochs(record: RunRecord, runs: int) -> dict[str, Any]:
    """Return the last epochs, which are shown, and the number and total time of those before."""
    epochs = _epochs(record)
    first = max(0, len(epochs) - max(1, min(_MOST_EPOCHS, _MOST_EPOCHS_IN_ALL // runs)))
    return {
        "epochs": [_epoch(epoch) for epoch in epochs[first:]],
        "epochs_left_out": first,
        "seconds_left_out": sum(_known([epoch.get("seconds") for epoch in epochs[:first]])),
    }


def _epoch(epoch: Mapping[str, Any]) -> dict[str, Any]:
    used = epoch.get("utilisation") or {}
    metrics = {f"metric {name}": value for name, value in (epoch.get("val_metrics") or {}).items()}
    own = epoch.get("device_metrics") or {}
    for key in ("mean", "worst_decile"):
        metrics |= {f"{key} {name}": value for name, value in (own.get(key) or {}).items()}
    known = {**{key: epoch.get(key) for key in _EPOCH_KEYS}, **metrics}
    return {**known, "utilisation": {lane: used.get(lane) for lane in LANES}}


def _evaluation(result: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the last model on the devices' own samples; None if no device evaluates models."""
    known = [epoch["device_metrics"] for epoch in epochs if epoch.get("device_metrics")]
    metrics = result.get("device_metrics") or (known[-1] if known else None)
    if not metrics:
        return None
    rows, left_out = device_rows(metrics, _MOST_DEVICES)
    return {
        "epoch": metrics.get("epoch"),
        "names": value_names(metrics),
        "mean": dict(metrics.get("mean") or {}),
        "worst_decile": dict(metrics.get("worst_decile") or {}),
        "rows": [asdict(row) for row in rows],
        "is_wider": bool(known) and len(known[-1].get("devices") or ()) < len(metrics.get("devices") or ()),
        "left_out": left_out,
        "seconds": metrics.get("seconds"),
        "bytes_down": metrics.get("bytes_down"),
    }


def _averages(epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means over all epochs."""
    keys = ("seconds", "server_idle_s", "device_idle_s", "bytes_up", "bytes_down", "efficiency", "predicted_s")
    used = {lane: _mean([(epoch.get("utilisation") or {}).get(lane) for epoch in epochs]) for lane in LANES}
    known = {lane: share for lane, share in used.items() if share is not None}
    return {
        **{key: _mean([epoch.get(key) for epoch in epochs]) for key in keys},
        "utilisation": used,
        "busiest": max(known, key=lambda lane: known[lane]) if known else None,
    }


def _known(values: Sequence[Any]) -> list[float]:
    return [float(value) for value in values if isinstance(value, int | float)]


def _mean(values: Sequence[Any]) -> float | None:
    known = _known(values)
    return sum(known) / len(known) if known else None


def _last(epochs: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next((epoch[key] for epoch in reversed(epochs) if epoch.get(key) is not None), None)


def _speedups(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the speed-up of this run over fl and sfl, as far as comparable runs are here."""
    comparable = [other for other in runs if _are_comparable(run, other)]
    bases = {other["method"]: other["seconds"] for other in comparable if other["method"] in ("fl", "sfl")}
    mine = run["seconds"]
    return {method: seconds / mine for method, seconds in bases.items() if seconds and mine and run["method"] != method}


def _are_comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two runs differ only in their methods, as far as is known."""
    pairs = [(one[key], other[key]) for key in _SAME_TRAINING]
    return all(first == second or None in (first, second) for first, second in pairs)


def _regrouped(config: Config) -> Config:
    """Return the configuration with groups merged that were split only to give each device its plan."""
    groups: list[DeviceSection] = []
    for whole, parts in groupby(config.devices, key=_without_number):
        first, *others = parts
        count = sum(group.count for group in (first, *others))
        groups.append(whole.model_copy(update={"count": count}) if others else first)
    return config.model_copy(update={"devices": tuple(groups)})


def _without_number(group: DeviceSection) -> DeviceSection:
    """Return the group to which a device named "pi-3" may have belonged, without its plan."""
    base, dash, number = group.name.rpartition("-")
    if group.count > 1 or not (dash and number.isdecimal()):
        return group
    return group.model_copy(update={"name": base, "split_point": None, "micro_batches": None})


def _training_texts(config: Config) -> dict[str, str]:
    """Return what is minimised, and how, and which devices take part in a round."""
    chosen, run = config.optimizer, config.run
    rate = None if chosen.factory or chosen.learning_rate is None else f"learning rate {chosen.learning_rate:g}"
    schedule = None if chosen.schedule == "constant" else f"schedule {chosen.schedule}"
    clip = None if chosen.clip_norm is None else f"gradients clipped to a norm of {chosen.clip_norm:g}"
    passes = None if run.local_epochs == 1 else f"{run.local_epochs} passes over its samples"
    given = run.devices_per_round
    many = (
        f"{given} devices" if isinstance(given, int) else f"{100 * given:g} % of the devices" if given != "all" else ""
    )
    drawn = f"{many}, drawn by the seed" if many else None
    return {
        "loss": config.task.loss,
        "optimizer": ", ".join(filter(None, [chosen.factory or chosen.name, rate, schedule, clip])),
        "round": ", ".join(filter(None, [drawn, passes])),
    }


def _server_text(config: Config | None) -> str | None:
    if config is None:
        return None
    server = config.server
    cores = "all cores" if server.cores is None else "one core" if server.cores == 1 else f"{server.cores} cores"
    machine = f"profile {server.profile}" if server.profile else "this machine"
    return f"{cores}, speed {server.speed:g} of {machine}"


def _plans_text(entries: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> str:
    plans = [plan_text(plan_from_json(entry), result.get("layers")) for entry in entries]
    if len(Counter(plans)) > 4:
        return f"{len(Counter(plans))} different plans, {Counter(plans).most_common(1)[0][0]} most often"
    return plans_text(plans) if plans else "no plan yet"


def _whole_text(result: Mapping[str, Any]) -> str | None:
    """Return what it means if no network is cut by a method that can cut; None if it does not apply."""
    method, plans = str(result.get("method")), _plans_in_force(result)
    if method not in METHODS or not plans:
        return None
    return whole_network_text(method, map(plan_from_json, plans), result.get("layers")) or None


# --- the timeline


def _traced(record: RunRecord) -> EpochTrace | None:
    epoch = shown_epoch([span.epoch for span in record.spans if span.kind == "step" and not span.waiting])
    if epoch is None:
        return None
    return EpochTrace([span for span in record.spans if span.epoch == epoch], epoch)


def _drawn_devices(traced: Sequence[EpochTrace | None], most: int) -> list[list[str]]:
    """Return the devices to draw: the slowest, the fastest and some between, the same in each run if possible.

    The first, which is the slowest over all runs, is the one whose iteration is shown.
    """
    known = [one.ended_s() for one in traced if one is not None]
    common = set.intersection(*map(set, known)) if known else set()
    if common:  # runs have different clocks
        firsts = [min(of.values()) for of in known]
        late = {name: sum(of[name] - first for of, first in zip(known, firsts, strict=True)) for name in common}
        return [slowest_to_fastest(late, most)] * len(traced)
    return [slowest_to_fastest(one.ended_s() if one is not None else {}, most) for one in traced]


def _timelines(
    record: RunRecord, traced: EpochTrace | None, devices: Sequence[str], like: int | None, most: int
) -> dict[str, Any]:
    if traced is None or not devices:
        return {"iteration": None, "epoch": None}
    iteration = iteration_timeline(traced, devices, like=like, most=most)
    if iteration is not None:
        iteration["left_out"] += record.spans_missing or 0
    return {
        "plan": _plans_text(_plans_in_force(record.result, traced.epoch), record.result),
        "iteration": iteration,
        "epoch": epoch_timeline(traced, devices, most=most) if record.spans_missing is None else None,
        "devices_traced": len(traced.devices),
    }


# --- the devices


def _seconds_of(record: RunRecord, traced: EpochTrace | None) -> float | None:
    """Return the duration of the displayed epoch; None if only part of it was traced."""
    if traced is None or record.spans_missing is not None:
        return None
    return next((epoch.get("seconds") for epoch in _epochs(record) if epoch.get("epoch") == traced.epoch), None)


def _devices(
    record: RunRecord, config: Config | None, traced: EpochTrace | None, seconds: float | None
) -> dict[str, Any]:
    """Return a row per device; if there are too many, traced devices are preferred."""
    force, layers = _plans_in_force(record.result), record.result.get("layers")
    plans = {entry["device"]: plan_text(plan_from_json(entry), layers) for entry in force if "device" in entry}
    specs = {spec.name: spec for spec in device_specs(config)} if config else {}
    samples, traffic = _samples(record.result), _traffic(record.result)
    names = sorted({*plans, *samples} or set(specs))
    is_traced = set(traced.devices) if traced else set()
    is_deployed = str(record.result.get("command", "")).startswith("pipar server")
    shown = sorted(sorted(names, key=lambda name: (name not in is_traced, name))[:_MOST_DEVICES])
    rows = []
    for name in shown:
        busy = traced.busy_s.get(name, {}) if traced else {}
        row = _device(name, plans.get(name), specs.get(name), samples.get(name), _shares(busy, seconds))
        if row["machine"] == _THIS_MACHINE and is_deployed:
            row["machine"] = "its own machine"
        up, down = traffic.get(name, (None, None))
        rows.append({**row, "bytes_up": up, "bytes_down": down})
    return {"rows": rows, "count": len(names), "epoch": traced.epoch if traced else None}


def _shares(busy_s: Mapping[str, float], seconds: float | None) -> dict[str, float]:
    words = {COMPUTE: "device", UPLINK: "uplink", DOWNLINK: "downlink"}
    return {words[lane]: min(1.0, busy / seconds) for lane, busy in busy_s.items()} if seconds else {}


def _device(
    name: str, plan: str | None, spec: DeviceSpec | None, samples: int | None, busy: Mapping[str, float]
) -> dict[str, Any]:
    machine = None
    if spec is not None:
        whole = spec.profile or _THIS_MACHINE
        machine = whole if spec.speed == 1 else f"{spec.speed:g} of {whole}"
    return {
        "device": name,
        "plan": plan,
        "samples": samples,
        "link": link_text(spec.link) if spec else None,
        "machine": machine,
        "busy": dict(busy),
    }


def _plans_in_force(result: Mapping[str, Any], epoch: float = math.inf) -> Sequence[Mapping[str, Any]]:
    """Return the plans that an epoch was trained with, or those that the training ended with."""
    said = [result, *(again for again in result.get("replans") or () if again["epoch"] <= epoch)]
    latest: Sequence[Mapping[str, Any]] = said[-1].get("plans", ())
    return latest


def _samples(result: Mapping[str, Any]) -> dict[str, int]:
    """Return the samples of each device in the last round that included it."""
    samples: dict[str, int] = {}
    for row in result.get("rounds", ()):
        samples.update(row.get("counted", {}))
    return samples


def _traffic(result: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the mean bytes that each device sent and received per epoch, over the epochs it took part in."""
    counts: dict[str, list[Sequence[float]]] = {}
    for epoch in result.get("epochs", ()):
        traffic = epoch.get("device_bytes")
        for name, both in traffic.items() if isinstance(traffic, Mapping) else ():
            if isinstance(both, list) and len(both) == 2 and all(isinstance(count, int) for count in both):
                counts.setdefault(name, []).append(both)
    return {
        name: (sum(up for up, _ in both) / len(both), sum(down for _, down in both) / len(both))
        for name, both in counts.items()
    }
