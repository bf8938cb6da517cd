"""The paper's networks without their own layers: the cuts that are found in their operations, and the plans by them.

Each network is wrapped, so that it is not an nn.Sequential. It is planned twice, for the same machines and with
the same counts: with all cuts that are found, and with those after its layers only, which are named.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from benchmarks.record import Claim, pipar
from pipar.networks.models import NETWORKS, build_model

SHAPE, CLASSES = (3, 32, 32), 10
LINKS = ("4g", "wifi")
_FLEET = [
    "data.name=synthetic", f"data.shape={list(SHAPE)}", f"data.classes={CLASSES}", "data.samples_per_device=500",
    "devices.count=4", "devices.profile=raspberry-pi-3b", "server.profile=i7-11850h", "server.cores=8",
]  # fmt: skip


class Wrapped(nn.Module):
    """A network that is not an nn.Sequential."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers = build_model(name, input_shape=SHAPE, classes=CLASSES, norm="group")

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.layers(images)
        return output


def vgg5() -> nn.Module:
    return Wrapped("vgg5")


def resnet18() -> nn.Module:
    return Wrapped("resnet18")


def mobilenetv3_small() -> nn.Module:
    return Wrapped("mobilenetv3_small")


def vgg16() -> nn.Module:
    return Wrapped("vgg16")


def resnet101() -> nn.Module:
    return Wrapped("resnet101")


def mobilenetv3_large() -> nn.Module:
    return Wrapped("mobilenetv3_large")


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    rows: dict[str, object] = {}
    missing, ratios, fewest = 0, [], math.inf
    for name in NETWORKS:
        layers = [f"layers.{child}" for child, _ in Wrapped(name).layers.named_children()][:-1]
        for link in LINKS:
            found, named = (_planned(name, link, cuts, folder) for cuts in (None, layers))
            at = {cut["after"]: cut["size_bytes"] for cut in found["cuts"]["cuts"]}
            wanted = {cut["after"]: cut["size_bytes"] for cut in named["cuts"]["cuts"]}
            missing += sum(at.get(after) != size for after, size in wanted.items())
            fewest = min(fewest, len(wanted))
            ratios.append(found["predicted_epoch_s"] / named["predicted_epoch_s"])
            rows[f"{name}, {link}"] = _row(found, at) | {"named": _row(named, wanted), "ratio": ratios[-1]}
    claims = [
        Claim("cuts after layers that are not found", missing, "", most=0),
        Claim("fewest cuts after layers of a network", fewest, "", least=4),
        Claim("predicted epoch with the cuts that are found / after layers only, largest", max(ratios), "", most=1.005),
        Claim("smallest", min(ratios), ""),
    ]
    return claims, {"networks": rows}


def _planned(name: str, link: str, cuts: list[str] | None, folder: Path) -> dict[str, Any]:
    settings = [*_FLEET, f"devices.link={link}", f"model.factory=benchmarks.automatic_cuts:{name}"]
    settings += [] if cuts is None else [f"model.cut_points={cuts}"]
    planned: dict[str, Any] = pipar(["plan", *(f"--set={setting}" for setting in settings)], folder)
    return planned


def _row(planned: dict[str, Any], cuts: dict[str, int]) -> dict[str, object]:
    plan = planned["plans"][0]
    after = [*cuts, "all layers"][plan["split_point"] - 1]
    return {
        "cuts": len(cuts),
        "after": after,
        "micro_batches": plan["micro_batches"],
        "encoding": plan["encoding"],
        "predicted_epoch_s": planned["predicted_epoch_s"],
    }
