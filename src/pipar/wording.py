"""Links, devices and plans in the words that tables and pages have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pipar.config import Config, DeviceSection, Link


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
    speed = "" if group.profile and group.speed == 1 else f", speed {group.speed:g} of {machine}"
    return f"{name}{group.count} {devices}, link {link_text(group.link)}{profile}{speed}"


def link_text(link: Link) -> str:
    """Return a link's rates and latency: "10/25 Mbit/s + 20 ms"; of one that changes, each in turn."""
    if link.cycle:
        return f"{', then '.join(link_text(one) for one in link.cycle)}, each for {link.every_s:g} s"
    if link.up_bps is None and link.down_bps is None:
        rates = "unlimited"
    else:
        rates = f"{_rate_text(link.up_bps)}/{_rate_text(link.down_bps)} Mbit/s"
    return f"{rates} + {link.latency_s * 1e3:g} ms" if link.latency_s else rates


def _rate_text(rate: float | None) -> str:
    return "unlimited" if rate is None else f"{rate / 1e6:g}"


def plans_text(plans: Iterable[str]) -> str:
    """Return the plans with the number of devices that have them, if there is more than one: "P=2 N=3"."""
    counts = Counter(plans)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} x {plan}" for plan, count in sorted(counts.items()))
