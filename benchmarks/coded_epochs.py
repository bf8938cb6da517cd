"""How much fewer bytes shorten an epoch: the encodings that `auto` chooses compared with raw, cut after layer 1.

VGG-5 and VGG-16 on 4g in virtual time, with costs, coding times and shares profiled on this machine; VGG-5 on real
CIFAR-10 images also in the real world with two device processes, alternating. On a link without a limit encoding does
not pay, and `auto` should cost nothing: there the fastest of many epochs counts, because other load on the machine only
makes epochs longer. Needs CIFAR-10 (PIPAR_DATA).
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.record import Claim, pipar

_SETTINGS = [
    "data.name=cifar10", "data.samples_per_device=500", "data.validation=0", "data.test=0", "devices.count=2",
    "devices.speed=0.5", "server.cores=1", "plan.split_point=1", "plan.replan=false", "run.trace=off",
]  # fmt: skip
MOST = {"vgg5": 0.70, "vgg16": 0.55}
TURNS = 3
#: Without a limit an epoch takes a second, and a difference of 1 % must be visible.
UNLIMITED_TURNS, UNLIMITED_EPOCHS = 6, 12


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    claims: list[Claim] = []
    details: dict[str, object] = {"settings": _SETTINGS}
    for model, most in MOST.items():
        profile = folder / f"{model}.json"
        pipar(["profile", f"--set=model.name={model}", *_set(_SETTINGS), "--output", str(profile)], folder)
        there = [f"model.name={model}", f"server.profile={profile}", f"devices.profile={profile}"]
        found = {
            coded: _epoch([*there, "devices.link=4g"], coded, folder, "--timing-only") for coded in ("raw", "auto")
        }
        details[f"virtual, {model}"] = found
        ratio = found["auto"]["seconds"] / found["raw"]["seconds"]
        claims.append(Claim(f"epoch with auto / raw, {model} on 4g, virtual", ratio, "", most=most))
        print(claims[-1], flush=True)
    turns = _turns("4g", folder, TURNS, epochs=2)
    details["real, 4g"] = turns
    ratio = median(turn["auto"]["seconds"] / turn["raw"]["seconds"] for turn in turns)
    claims.append(Claim("epoch with auto / raw, vgg5 on 4g, real", ratio, "", most=MOST["vgg5"]))
    turns = _turns("unlimited", folder, UNLIMITED_TURNS, UNLIMITED_EPOCHS)
    details["real, unlimited"] = turns
    ratio = _quickest(turns, "auto") / _quickest(turns, "raw")
    claims.append(Claim("epoch with auto / raw, vgg5 without a rate limit, real", ratio, "", most=1.01))
    coded = sum(set(turn["auto"]["plan"]) != {"raw"} for turn in turns)
    claims.append(Claim("runs without a rate limit in which auto encoded something", coded, "", most=0))
    return claims, details


def _turns(link: str, folder: Path, count: int, epochs: int) -> list[dict[str, Any]]:
    """Return the results of alternating runs; the order alternates too."""
    there = ["model.name=vgg5", f"devices.link={link}", f"run.epochs={epochs}"]
    orders = [("raw", "auto") if turn % 2 == 0 else ("auto", "raw") for turn in range(count)]
    return [{coded: _epoch(there, coded, folder) for coded in order} for order in orders]


def _quickest(turns: list[dict[str, Any]], coded: str) -> float:
    """Return the mean over the turns of each turn's fastest epoch."""
    return mean(min(turn[coded]["epochs"]) for turn in turns)


def _epoch(settings: list[str], encoding: str, folder: Path, *world: str) -> dict[str, Any]:
    result = pipar(["run", *_set([*_SETTINGS, *settings, f"wire.encoding={encoding}"]), *world], folder)
    last, plan = result["epochs"][-1], result["plans"][0]
    return {
        "seconds": last["seconds"],
        "epochs": [epoch["seconds"] for epoch in result["epochs"]],
        "bytes": last["bytes_up"] + last["bytes_down"],
        "micro_batches": plan["micro_batches"],
        "plan": (plan["up"], plan["down"]),
        "weights_sha256": result["weights_sha256"],
    }


def _set(settings: list[str]) -> list[str]:
    return [f"--set={setting}" for setting in settings]
