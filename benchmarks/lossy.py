"""The accuracy lost and the bytes saved by each lossy encoding relative to the exact ones, on digits and CIFAR-10.

VGG-5 on four devices in virtual time, cut after the first layer; all other settings are the same. Exact encodings give
the same weights as raw, bit for bit; for the lossy ones there is no claim beyond the measurement. Needs
CIFAR-10 (PIPAR_DATA).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.record import Claim, pipar

EXACT = ("raw", "sparse-planes")
LOSSY = ("fp16", "bf16", "int8", "topk")
#: The datasets, each with settings that keep a training to minutes.
TRAININGS = {
    "digits": ("data.name=digits", "data.samples_per_device=290", "run.epochs=5", "optimizer.learning_rate=0.03"),
    "cifar10": ("data.name=cifar10", "data.samples_per_device=1250", "run.epochs=8", "optimizer.learning_rate=0.03"),
}
_SETTINGS = [
    "model.name=vgg5", "devices.count=4", "plan.split_point=1", "plan.micro_batches=10", "plan.replan=false",
    "run.trace=off",
]  # fmt: skip


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    claims: list[Claim] = []
    rows: list[dict[str, Any]] = []
    for name, training in TRAININGS.items():
        settings = [f"--set={setting}" for setting in (*_SETTINGS, *training)]
        found = {encoding: _train(settings, encoding, folder) for encoding in (*EXACT, *LOSSY)}
        rows += [{"data": name, "encoding": encoding} | row for encoding, row in found.items()]
        same = found["raw"]["weights_sha256"] == found["sparse-planes"]["weights_sha256"]
        claims.append(Claim(f"{name}: raw and sparse-planes train the same weights", float(same), "", least=1))
        for encoding in (*EXACT, *LOSSY):
            row = found[encoding]
            claims.append(Claim(f"{name}, {encoding}: test accuracy", row["test_accuracy"], ""))
            saved = row["bytes"] / found["raw"]["bytes"]
            claims.append(Claim(f"{name}, {encoding}: bytes of an epoch / raw", saved, ""))
    return claims, {"settings": _SETTINGS, "trainings": TRAININGS, "rows": rows}


def _train(settings: list[str], encoding: str, folder: Path) -> dict[str, Any]:
    """Return accuracy, loss and bytes of a training with this encoding."""
    result = pipar(["run", *settings, f"--set=wire.encoding={encoding}", "--virtual"], folder)
    last = result["epochs"][-1]
    row = {
        "test_accuracy": result["test_accuracy"],
        "val_accuracy": [epoch["val_accuracy"] for epoch in result["epochs"]],
        "train_loss": last["train_loss"],
        "bytes": last["bytes_up"] + last["bytes_down"],
        "seconds": last["seconds"],
        "weights_sha256": result["weights_sha256"],
    }
    print(encoding, row, flush=True)
    return row
