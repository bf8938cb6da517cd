"""Texts about links, devices, plans and privacy that tables and pages share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pipar.methods import METHODS, Plan
from pipar.settings.config import Config, DeviceSection
from pipar.settings.links import Link
from pipar.units import format_mbits

#: Instead of P, where a network is one stage.
WHOLE = "whole network"


def training_text(config: Config) -> str:
    """Return what is trained on what: "vgg5 on digits"."""
    return f"{config.model.factory or config.model.name} on {config.data.factory or config.data.name}"


def setting_text(config: Config, between: str = "; ") -> str:
    """Return what is emulated: "4 devices, link 10/25 Mbit/s, speed 0.05 of this machine"."""
    return between.join(_group_text(group) for group in config.devices)


def _group_text(group: DeviceSection) -> str:
    name = "" if group.name == "device" else f"{group.name}: "
    profile = f", profile {group.profile}" if group.profile else ""
    devices = "device" if group.count == 1 else "devices"
    machine = "that profile" if group.profile else "this machine"
    speed = "" if group.speed == 1 else f", speed {group.speed:g} of {machine}"
    return f"{name}{group.count} {devices}, link {link_text(group.link)}{profile}{speed}"


def link_text(link: Link) -> str:
    """Return a link's rates and latency: "10/25 Mbit/s + 20 ms"; of one that changes, each in turn."""
    if link.cycle:
        return f"{', then '.join(link_text(one) for one in link.cycle)}, each for {link.every_s:g} s"
    if link.up_bps is None and link.down_bps is None:
        rates = "unlimited"
    else:
        rates = f"{format_mbits(link.up_bps)}/{format_mbits(link.down_bps)} Mbit/s"
    return f"{rates} + {link.latency_s * 1e3:g} ms" if link.latency_s else rates


def plan_text(plan: Plan, layers: int | None) -> str:
    """Return a plan: "P=2 N=3", or "whole network N=1" where the network is not numbered in layers, as in fl."""
    return str(plan).replace("P=1", WHOLE, 1) if layers == 1 else str(plan)


def whole_network_text(method: str, plans: Iterable[Plan], layers: int | None) -> str:
    """Return what it means if a method that can cut networks cuts none (P = Q); else an empty text."""
    is_whole = METHODS[method].splits and {plan.split_point for plan in plans} == {layers}
    return "the whole network on the device: federated learning" if is_whole else ""


def plans_text(plans: Iterable[str]) -> str:
    """Return the plans with the number of devices that have them, if there is more than one: "P=2 N=3"."""
    counts = Counter(plans)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} x {plan}" for plan, count in sorted(counts.items()))


def range_text(numbers: Sequence[int]) -> str:
    """Return "3", or "3-5" where they differ."""
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least}-{most}"


def privacy_text(result: Mapping[str, Any], config: Config | None, between: str = "; ") -> str | None:
    """Return the privacy measures of a run and its epsilon; None if there were none."""
    said = [_updates_text(result["privacy"], str(result.get("method")))] if result.get("privacy") else []
    privacy = config.privacy if config else None
    if privacy and privacy.pixel_epsilon is not None:
        said.append(
            f"inputs: noise of {privacy.pixel_scale:.3g} on each normalised value (PixelDP with epsilon "
            f"{privacy.pixel_epsilon:g} and delta {privacy.pixel_delta:g} for changes up to {privacy.pixel_bound:g})"
        )
    if privacy and privacy.label_epsilon is not None:
        said.append(f"labels: randomised response with epsilon {privacy.label_epsilon:g} where they leave a device")
    return between.join(said) or None


def equivalence(reasons: Collection[str]) -> str:
    """Return how weights compare to those of plain training: "exact", or "statistical" if there are reasons."""
    return "statistical" if reasons else "exact"


def equivalence_text(result: Mapping[str, Any]) -> str | None:
    """Return the equivalence of a run with its reasons: "statistical: dropout, noise on updates"; None if unknown."""
    said, reasons = result.get("equivalence"), result.get("equivalence_reasons") or []
    if said == "lossy":  # in a result of an earlier version
        said, reasons = "statistical", ["lossy encoding"]
    return f"{said}: {', '.join(map(str, reasons))}" if reasons else said


def statistical_mark(result: Mapping[str, Any]) -> str:
    """Return the mark of a number of a statistical run, " †", or an empty text; its reasons stand below the table."""
    return " †" if (equivalence_text(result) or "").startswith("statistical") else ""


def ruled_out_text(most: float, ruled_out: Mapping[int, float]) -> str:
    """Return which cuts a limit rules out, with what they leak: "privacy.max_leakage = 0.5 rules out no cut"."""
    cuts = ", ".join(f"P={p} (leaks {leaks:.2f})" for p, leaks in ruled_out.items())
    return f"privacy.max_leakage = {most:g} rules out {cuts or 'no cut'}"


def guess_text(most: float, guess: float | None) -> str:
    """Return a warning if a limit is below the score of an attacker without any activation; else an empty text.

    An attack that learns nothing from activations reaches about that score.
    """
    if guess is None or most >= guess:
        return ""
    return (
        f"It is below {guess:.3f}, the score of the mean of other images, without any activation: hardly any cut "
        "except P = Q can meet it. Raise the limit."
    )


def _updates_text(privacy: Mapping[str, Any], method: str) -> str:
    """Return the devices' epsilon, the noise that gives it, and what it does not cover."""
    devices = privacy["devices"]
    spent, releases = [one["epsilon"] for one in devices] or [0.0], [one["releases"] for one in devices] or [0]
    least, most = (f"{value:.4g}" for value in (min(spent), max(spent)))
    each = f"{range_text(releases)} update{'' if releases == [1] * len(releases) else 's'} of each device"
    noise = f"clipped to {privacy['clip']:g}, noise {privacy['noise_multiplier']:.4g} times that"
    epsilon = f"epsilon {most if least == most else f'{least} to {most}'} at delta {privacy['delta']:g}"
    uncovered = "" if method == "fl" else "; does not cover activations and labels, which are sent too"
    return f"{epsilon} for {each}, {noise}{uncovered}"
