"""Results of trainings, bit for bit: recorded before a refactoring and compared after it.

    python -m benchmarks.fingerprints record
    python -m benchmarks.fingerprints compare

A fingerprint is the hash of the weights, the bytes and the virtual seconds of each epoch, the plans and the names of
all fields of result.json. Named machines stand in for measured profiles, so the seconds are the same on every machine.
The weights are the same only on equal processors with the same version of torch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
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
    "momentum kept": f"run --virtual {_FEW} {_CHANGING} --set optimizer.momentum_at_aggregation=keep --epochs 4",
    "the paper's estimate": f"run --virtual {_FEW} --set plan.estimate=paper",
    "latency": f"run --virtual {_FEW} --link {{up='10Mbit/s',down='25Mbit/s',latency='20ms'}}",
    "uneven shards": (
        f"run --virtual {_FEW} --set data.partition=dirichlet --set data.alpha=0.3 --set data.augment=true"
    ),
    "resnet18": f"run --virtual {_FEW} --model resnet18 --epochs 1 --devices 2",
    "mobilenet, no norm": (
        f"run --virtual {_FEW} --model mobilenetv3_small --set model.norm=none --epochs 1 --devices 2"
    ),
    "replanning pipar": f"run --virtual {_FEW} {_CHANGING} --epochs 4",
    "replanning timing-only": f"run {_MANY}=200 --devices 8 --epochs 6 {_CHANGING}",
    "replanning sfl2": f"run {_MANY}=200 --devices 3 --method sfl2 --epochs 4 {_CHANGING}",
    "noise multiplier": f"run --virtual {_FEW} --set privacy.noise_multiplier=1.0 --set privacy.clip=0.5",
    "target epsilon": f"run --virtual {_FEW} --set privacy.target_epsilon=8 --set privacy.clip=0.5",
    "noise on inputs and labels": f"run --virtual {_FEW} --set privacy.pixel_epsilon=0.5 --set privacy.label_epsilon=2",
    "fedadam": f"run --virtual {_FEW} --set server.aggregator=fedadam",
    "krum": f"run --virtual {_FEW} --set server.aggregator=krum --devices 5",
    "fedprox": f"run --virtual {_FEW} --set server.aggregator=fedprox",
    "patience": f"run --virtual {_FEW} --epochs 6 --set run.patience=1",
    "a fleet of three kinds": "run examples/fleet.toml --timing-only --epochs 2",
    "100 devices": f"run {_MANY}=100 --devices 100 --epochs 1 --link 4g",
    "full trace off": f"run --virtual {_FEW} --set run.trace=off",
    "own network": (
        "run --virtual --epochs 2 --set model.factory=examples.own_model:network "
        "--set data.factory=examples.own_model:samples"
    ),
    "plan": "plan --data cifar10 --devices 10 --link wifi --set data.samples_per_device=500 --set server.cores=2",
    "plan, exhaustive": "plan --exhaustive --data cifar10 --devices 2 --link 4g --set data.samples_per_device=200",
    "real processes": (
        f"run {_FEW} {_FIXED} --set model.dtype=float64 --set wire.encoding=raw --link unlimited --speed 1 --devices 2 "
        "--set plan.replan=false"
    ),
}  # fmt: skip
#: In real time: their seconds differ from run to run.
_REAL = ("real processes", "resumed deployment")


def main(words: list[str]) -> int:
    if words not in (["record"], ["compare"]):
        print("usage: python -m benchmarks.fingerprints record|compare", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(2) as pool:
        taken = dict(zip(TRAININGS, pool.map(fingerprint, TRAININGS), strict=True))
    taken["resumed deployment"] = resumed_deployment()
    if words == ["record"]:
        lines = [json.dumps({"name": name, **content}, sort_keys=True) for name, content in taken.items()]
        FILE.write_text("\n".join(lines) + "\n")
        print(f"{len(taken)} fingerprints in {FILE}")
        return 0
    taken = json.loads(json.dumps(taken))  # tuples as the lists that they are in the file
    return compare({(row := json.loads(line)).pop("name"): row for line in FILE.read_text().splitlines()}, taken)


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """Print all differences; return 1 if there are any."""
    changed = 0
    for name in sorted({*before, *now}):
        one, other = before.get(name, {}), now.get(name, {})
        different = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
        changed += bool(different)
        print(f"{name}: {'the same' if not different else 'other ' + ', '.join(different)}")
        for key in different:
            print(f"  {key}\n    before {one.get(key)}\n    now    {other.get(key)}")
    print(f"{len(now) - changed} of {len(now)} the same")
    return 1 if changed else 0


def fingerprint(name: str) -> dict[str, Any]:
    """Train and return the fingerprint of the result."""
    words = [re.sub("'", '"', word) for word in TRAININGS[name].split()]
    if name not in _REAL and not name.startswith("own"):
        words += _MACHINES.split()
    if name == "a fleet of three kinds":
        words = words[: -len(_MACHINES.split())] + _MACHINES.split()[:2]
    with tempfile.TemporaryDirectory() as folder:
        result = record.pipar(words, Path(folder))
    return of_result(result, timed=name not in _REAL and not name.startswith("own"))


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


def resumed_deployment() -> dict[str, Any]:
    """Train two epochs with a real server and two devices, stop, resume for two more, and return the fingerprint."""
    words = [word for key in _DEPLOYED.split() for word in ("--set", key)]
    with tempfile.TemporaryDirectory() as folder:
        _deployment(Path(folder), [*words, "--epochs", "2"])
        _deployment(Path(folder), [*words, "--epochs", "4", "--resume"])
        return of_result(json.loads((Path(folder) / "boards" / "result.json").read_text()), timed=False)


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
