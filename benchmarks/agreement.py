"""The real world compared with the virtual world on the same configuration, from an earlier profile."""

from __future__ import annotations

from pathlib import Path

from benchmarks.record import Claim, pipar

_SETTINGS = [
    "run.epochs=3", "data.name=synthetic", "data.shape=[3, 32, 32]", "data.samples_per_device=500",
    "devices.count=2", "devices.speed=0.1", "plan.split_point=1", "plan.micro_batches=8",
]  # fmt: skip


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    profile = folder / "profile.json"
    settings = [f"--set={setting}" for setting in _SETTINGS]
    pipar(["profile", *settings, "--output", str(profile)], folder)
    settings += [f"--set=server.profile={profile}", f"--set=devices.profile={profile}"]
    claims, details = [], {}
    for link in ("4g", "wifi"):
        arguments = ["run", *settings, f"--set=devices.link={link}"]
        virtual = pipar([*arguments, "--virtual"], folder)["epochs"]
        real = pipar(arguments, folder)["epochs"]
        details[link] = {"real_s": [e["seconds"] for e in real], "virtual_s": [e["seconds"] for e in virtual]}
        ratio = sum(e["seconds"] for e in real) / sum(e["seconds"] for e in virtual)
        claims.append(Claim(f"epoch seconds on {link}, real / virtual", ratio, "", least=0.9, most=1.1))
    return claims, details
