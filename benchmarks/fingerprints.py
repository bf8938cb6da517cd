"""Results of trainings, bit for bit: recorded before a refactoring and compared after it.

    python -m benchmarks.fingerprints record [NAME ...]
    python -m benchmarks.fingerprints compare [NAME ...]

A fingerprint is the hash of the weights, the bytes and the virtual seconds of each epoch, the plans, the new plans of a
replanning and the names of all fields of result.json. Named machines stand in for measured profiles, so the seconds are
the same on every machine. The weights are the same only on equal processors with the same version of torch.

A training whose name says that the cut moves or that it stops early must do so; otherwise both commands fail.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import record

FILE = record.RESULTS / "fingerprints.jsonl"

_MACHINES = "--set server.profile=i7-11850h --set devices.profile=raspberry-pi-3b"
_FEW = "--epochs 2 --set data.samples_per_device=50 --set run.batch_size=20 --set data.validation=20 --set data.test=20"
_FIXED = "--split-point 2 --micro-batches 4"
_DEPLOYED = (
    "run.batch_size=20 data.samples_per_device=60 model.dtype=float64 wire.encoding=raw plan.split_point=2 "
    "plan.micro_batches=4 plan.replan=false server.cores=1"
)
_CHANGING = """--link {cycle=["4g","wifi"],every="2s"}"""
_CHANGING_MUCH = """--link {cycle=["4g","unlimited"],every="2s"}"""
_CHANGING_SLOWLY = """--link {cycle=["4g","unlimited"],every="6s"}"""
#: Enough samples that a change of the link is measured before the next one.
_REPLANNED = (
    "run --virtual --devices 2 --epochs 8 --set data.samples_per_device=100 --set run.batch_size=20 "
    "--set data.validation=20 --set data.test=20"
)
_DIVERGING = "--set optimizer.learning_rate=0.5"
_KEEP = "--set optimizer.state_at_aggregation=keep"
_REAL_PROCESSES = (
    f"run {_FEW} {_FIXED} --set model.dtype=float64 --set wire.encoding=raw --link unlimited --speed 1 --devices 2 "
    "--set plan.replan=false"
)
_OWN = (
    "run --virtual --epochs 2 --set model.factory=examples.own_model:network "
    "--set data.factory=examples.own_model:samples"
)

_METHODS = ("fl", "sl", "sfl", "sfl2", "pipar")
_MANY = "--timing-only --data cifar10 --set data.samples_per_device"

#: The words after `pipar`, by the name of the training.
TRAININGS: dict[str, str] = {
    **{f"virtual {method}": f"run --virtual --method {method} {_FEW}" for method in _METHODS},
    **{
        f"virtual {method}, float64 P=2": f"run --virtual --method {method} {_FEW} {_FIXED} --set model.dtype=float64"
        for method in _METHODS
    },
    **{
        f"timing-only {method}": f"run --timing-only --method {method} {_FEW} --data cifar10 --devices 6 --link wifi"
        for method in _METHODS
    },
    **{
        f"encoding {encoding}": f"run --virtual {_FEW} {_FIXED} --set wire.encoding={encoding}"
        for encoding in ("raw", "sparse", "planes", "sparse-planes", "fp16", "bf16", "int8", "topk")
    },
    "models as changes": (
        f"run --virtual {_FEW} --split-point 4 --micro-batches 2 --link {{up='1Mbit/s',down='1Mbit/s'}}"
    ),
    "1f1b": f"run --virtual {_FEW} {_FIXED} --set plan.schedule=1f1b --set plan.window=2",
    "batch norm": f"run --virtual {_FEW} {_FIXED} --set model.norm=batch",
    "momentum kept": f"run --virtual {_FEW} {_CHANGING} {_KEEP} --epochs 4",
    "the paper's estimate": f"run --virtual {_FEW} --set plan.estimate=paper",
    "latency": f"run --virtual {_FEW} --link {{up='10Mbit/s',down='25Mbit/s',latency='20ms'}}",
    "uneven shards": (
        f"run --virtual {_FEW} --set data.partition=dirichlet --set data.alpha=0.3 --set data.augment=true"
    ),
    "resnet18": f"run --virtual {_FEW} --model resnet18 --epochs 1 --devices 2",
    "mobilenet, no norm": (
        f"run --virtual {_FEW} --model mobilenetv3_small --set model.norm=none --epochs 1 --devices 2"
    ),
    "a changing link, pipar": f"run --virtual {_FEW} {_CHANGING} --epochs 4",
    "replanning timing-only": f"run {_MANY}=200 --devices 8 --epochs 6 {_CHANGING}",
    "a changing link, sfl2": f"run {_MANY}=200 --devices 3 --method sfl2 --epochs 4 {_CHANGING}",
    "replanning moves the cut, momentum kept": f"{_REPLANNED} {_CHANGING} {_KEEP}",
    "replanning moves the cut, momentum reset": f"{_REPLANNED} {_CHANGING}",
    "replanning moves the cut, sfl": f"{_REPLANNED} {_CHANGING_MUCH} --method sfl --epochs 7 {_KEEP}",
    "replanning moves the cut, timing-only": f"run {_MANY}=200 --devices 4 --epochs 6 {_CHANGING}",
    # With one server model for all devices the cut stays, and only the encodings change.
    "replanning the encodings, sfl2": f"{_REPLANNED} {_CHANGING_MUCH} --method sfl2 {_KEEP}",
    "replanning the encodings, sl": f"{_REPLANNED} {_CHANGING_SLOWLY} --method sl --epochs 5 {_KEEP}",
    "noise multiplier": f"run --virtual {_FEW} --set privacy.noise_multiplier=1.0 --set privacy.clip=0.5",
    "target epsilon": f"run --virtual {_FEW} --set privacy.target_epsilon=8 --set privacy.clip=0.5",
    "noise on inputs and labels": f"run --virtual {_FEW} --set privacy.pixel_epsilon=0.5 --set privacy.label_epsilon=2",
    "fedadam": f"run --virtual {_FEW} --set server.aggregator=fedadam",
    "krum": f"run --virtual {_FEW} --set server.aggregator=krum --devices 5",
    "fedprox": f"run --virtual {_FEW} --set server.aggregator=fedprox",
    "patience stops early": f"run --virtual {_FEW} --devices 2 --epochs 6 {_DIVERGING} --set run.patience=1",
    "budget stops early": (
        f"run --virtual {_FEW} --devices 2 --epochs 4 --set privacy.noise_multiplier=1 --set privacy.target_epsilon=16 "
        "--set privacy.clip=0.5"
    ),
    "patience": f"run --virtual {_FEW} --epochs 6 --set run.patience=1",
    "a fleet of three kinds": "run examples/fleet.toml --timing-only --epochs 2",
    "100 devices": f"run {_MANY}=100 --devices 100 --epochs 1 --link 4g",
    "full trace off": f"run --virtual {_FEW} --set run.trace=off",
    "a named machine for an own network": f"{_OWN} {_FIXED}",
    "plan": "plan --data cifar10 --devices 10 --link wifi --set data.samples_per_device=500 --set server.cores=2",
    "plan, exhaustive": "plan --exhaustive --data cifar10 --devices 2 --link 4g --set data.samples_per_device=200",
    "real processes": _REAL_PROCESSES,
    "real processes, momentum kept": f"{_REAL_PROCESSES} {_KEEP}",
}  # fmt: skip
#: The settings of the deployments that are stopped and resumed, by the name of the training.
DEPLOYMENTS: dict[str, str] = {
    "resumed deployment": _DEPLOYED,
    "resumed deployment, momentum kept": f"{_DEPLOYED} optimizer.state_at_aggregation=keep",
}
_NAMES = (*TRAININGS, *DEPLOYMENTS)
#: In real time: their seconds, and the bytes of most epochs, differ from run to run.
_VARYING = ("real processes", "real processes, momentum kept", *DEPLOYMENTS)
#: The epochs of these whose bytes are the same in every run. Later ones include spans and messages sent at intervals.
_STEADY_BYTES: dict[str, dict[str, tuple[int, ...]]] = {
    "real processes, momentum kept": {"bytes_up": (1,), "bytes_down": (1,)},
    "resumed deployment, momentum kept": {"bytes_down": (1, 3)},
}


def main(words: list[str]) -> int:
    command, names = words[:1], words[1:] or list(_NAMES)
    if command not in (["record"], ["compare"]) or not {*names} <= {*_NAMES}:
        print("usage: python -m benchmarks.fingerprints record|compare [NAME ...]", file=sys.stderr)
        return 2
    before = {(row := json.loads(line)).pop("name"): row for line in FILE.read_text().splitlines()}
    now = _taken(names)
    if failures := [failure for name in names if (failure := broken_promise(name, now[name]))]:
        print("\n".join(failures), file=sys.stderr)
        return 1
    if command == ["record"]:
        _write(before | now)
        print(f"{len(now)} fingerprints recorded in {FILE}")
        return 0
    return compare({name: row for name, row in before.items() if name in names or not words[1:]}, now)


def _taken(names: Sequence[str]) -> dict[str, Any]:
    """Return the fingerprints by name; deployments, which need both cores, come last and one at a time."""
    with ThreadPoolExecutor(2) as pool:
        trained = [name for name in names if name in TRAININGS]
        taken = dict(zip(trained, pool.map(fingerprint, trained), strict=True))
    taken |= {name: fingerprint(name) for name in names if name in DEPLOYMENTS}
    found: dict[str, Any] = json.loads(json.dumps(taken))  # tuples as the lists that they are in the file
    return found


def _write(rows: Mapping[str, Any]) -> None:
    lines = [json.dumps({"name": name, **content}, sort_keys=True) for name, content in rows.items()]
    FILE.write_text("\n".join(lines) + "\n")


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """Print all differences; return 1 if there are any. Keys that a recorded row lacks are not compared."""
    changed = 0
    for name in sorted({*before, *now}):
        one, other = before.get(name, {}), now.get(name, {})
        if added := _added_fields(one, other):
            print(f"{name}: new fields {', '.join(added)}")
        different = sorted(key for key in one or other if key not in one or one[key] != _known(one[key], other, key))
        changed += bool(different)
        print(f"{name}: {'the same' if not different else 'other ' + ', '.join(different)}")
        for key in different:
            print(f"  {key}\n    before {one.get(key)}\n    now    {other.get(key)}")
    print(f"{len(now) - changed} of {len(now)} the same")
    return 1 if changed else 0


def _added_fields(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return sorted({*now.get("fields", ())} - {*before.get("fields", now.get("fields", ()))})


def _known(before: Any, row: Mapping[str, Any], key: str) -> Any:
    """Return what a row has under a key, without the fields that were added after the recording."""
    now = row.get(key)
    if key == "fields" and now is not None:
        return sorted({*now} & {*before})
    return _at_keys_of(before, now)


def _at_keys_of(before: Any, now: Any) -> Any:
    """Return a value with only those keys that the recorded one has as well."""
    if isinstance(before, dict) and isinstance(now, dict):
        return {key: _at_keys_of(before[key], item) for key, item in now.items() if key in before}
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [_at_keys_of(one, other) for one, other in zip(before, now, strict=True)]
    return now


def broken_promise(name: str, found: Mapping[str, Any]) -> str | None:
    """Return in a sentence what a training did not do although its name says so; None if it did."""
    if "replanning" in name and not found["replans"]:
        return f"{name!r} has no entry in replans: give it a link whose changes lead to new plans."
    if "moves the cut" in name and not _cut_moves(found):
        return f"{name!r} never changes a split point: give it links that differ more."
    if "stops early" in name and len(found["losses"]) >= _epochs_asked(name):
        return f"{name!r} trains all {_epochs_asked(name)} epochs: give it a smaller budget or a larger learning rate."
    if "budget stops early" in name and not found["stopped"]:
        return f"{name!r} does not stop because of its privacy budget: give it a smaller privacy.target_epsilon."
    return None


def _cut_moves(found: Mapping[str, Any]) -> bool:
    plans = [found["plans"], *(replan["plans"] for replan in found["replans"])]
    return len({tuple(plan["split_point"] for plan in one) for one in plans}) > 1


def _epochs_asked(name: str) -> int:
    """Return the last --epochs of a training, which is the one that counts."""
    return int(re.findall(r"--epochs (\d+)", TRAININGS[name])[-1])


def fingerprint(name: str) -> dict[str, Any]:
    """Train and return the fingerprint of the result."""
    with tempfile.TemporaryDirectory() as folder:
        result = _resumed(name, Path(folder)) if name in DEPLOYMENTS else _trained(name, Path(folder))
    found = of_result(result, timed=name not in _VARYING)
    if steady := _STEADY_BYTES.get(name):
        rows = result["epochs"]
        found["bytes"] = {key: [rows[epoch - 1][key] for epoch in epochs] for key, epochs in steady.items()}
    return found


def _trained(name: str, folder: Path) -> Any:
    words = [re.sub("'", '"', word) for word in TRAININGS[name].split()]
    if name not in _VARYING:
        words += _MACHINES.split()
    if name == "a fleet of three kinds":
        words = words[: -len(_MACHINES.split())] + _MACHINES.split()[:2]
    return record.pipar(words, folder)


def of_result(result: Any, *, timed: bool = True) -> dict[str, Any]:
    """Return the fingerprint of a result.json, or of the output of `pipar plan --json`."""
    found: dict[str, Any] = {"fields": sorted(_fields(result))}
    for key in ("weights_sha256", "plans", "test_accuracy", "equivalence"):
        if key in result:
            found[key] = result[key]
    epochs = result.get("epochs")
    if epochs is None:
        found["plan"] = _without_planning_time(result)
        return found
    found["losses"] = [(row["train_loss"], row["val_loss"]) for row in epochs]
    found["bytes"] = [(row["bytes_up"], row["bytes_down"]) for row in epochs] if timed else None
    found["seconds"] = [row["seconds"] for row in epochs] if timed else None
    # Without the reasons, whose wording may change, and which name measured rates.
    found["replans"] = [{"epoch": replan["epoch"], "plans": replan["plans"]} for replan in result["replans"]]
    found["stopped"] = result["stopped"] is not None
    found["epsilons"] = [row["epsilon"] for row in epochs]
    return found


def _without_planning_time(value: Any) -> Any:
    """Return the output of `pipar plan --json` without the planning time."""
    if isinstance(value, dict):
        return {key: _without_planning_time(item) for key, item in value.items() if key != "seconds"}
    return [_without_planning_time(item) for item in value] if isinstance(value, list) else value


def _fields(value: Any, path: str = "") -> set[str]:
    """Return the paths of all keys; those of a list count together, names of devices and versions do not."""
    if isinstance(value, dict):
        if path.endswith(("versions", "own_s", "lanes", "busy_s")):
            return {path}
        return {path} | {inner for key, item in value.items() for inner in _fields(item, f"{path}.{key}")}
    if isinstance(value, list):
        return {path} | {inner for item in value for inner in _fields(item, f"{path}[]")}
    return {path}


def _resumed(name: str, folder: Path) -> Any:
    """Train two epochs with a real server and two devices, stop, resume for two more, and return the result."""
    words = [word for key in DEPLOYMENTS[name].split() for word in ("--set", key)]
    _deployment(folder, [*words, "--epochs", "2"])
    _deployment(folder, [*words, "--epochs", "4", "--resume"])
    return json.loads((folder / "boards" / "result.json").read_text())


def _deployment(runs: Path, words: list[str]) -> None:
    environment = os.environ | {"PIPAR_RUNS": str(runs)}
    pipar = [sys.executable, "-m", "pipar"]
    listen = ["--listen", "127.0.0.1:0", "--log-format", "json"]
    server = subprocess.Popen(
        [*pipar, "server", "examples/boards.toml", *listen, *words], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    said = ""
    while not (address := re.search(r"127\.0\.0\.1:[1-9]\d+", said)):
        line = server.stderr.readline()
        if not line:
            raise RuntimeError(f"the server ended: {said}")
        said += line
    common = [word for word in words if word != "--resume"]
    devices = [
        subprocess.Popen(
            [*pipar, "device", "examples/boards.toml", "--server", address[0], "--name", name, *_device_words(common)],
            env=environment, stderr=subprocess.DEVNULL,
        )
        for name in ("pi-1", "pi-2")
    ]  # fmt: skip
    said += server.stderr.read()
    codes = [server.wait(), *(device.wait(120) for device in devices)]
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {said[-2000:]}")


def _device_words(words: list[str]) -> list[str]:
    """Return the words without --epochs, which only the server takes."""
    at = words.index("--epochs")
    return words[:at] + words[at + 2 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
