"""Which device of torch the server and each device compute on, by the configuration and by what this machine has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from pipar.errors import ConfigError
from pipar.settings.config import Config, DeviceSection, DeviceSpec, ServerSection, device_specs
from pipar.tensors.torch_device import CPU, TorchDevice, find_torch_device


def server_torch_device(config: Config) -> TorchDevice:
    """Return what the server's replicas compute on; raise ConfigError if it is not here, or lacks the dtype."""
    return _found(config, config.server, "server.torch_device")


def device_torch_device(config: Config, name: str) -> TorchDevice:
    """Return what a device's part computes on; raise ConfigError if it is not here, or lacks the dtype."""
    if all((group.torch_device, group.autocast) == ("cpu", "off") for group in config.devices):
        return CPU
    spec = next((spec for spec in device_specs(config) if spec.name == name), None)
    return CPU if spec is None else spec_torch_device(config, spec)


def spec_torch_device(config: Config, spec: DeviceSpec) -> TorchDevice:
    """Return the same for the settings of one device."""
    return _found(config, spec, "devices.torch_device")


def named_torch_device(config: Config, on: tuple[str, str]) -> TorchDevice:
    """Return the device of a torch_device and an autocast."""
    found = find_torch_device(on[0], "torch_device", autocast=on[1] == "bf16")
    found.check_dtype(config.model.dtype, "torch_device")
    return found


def check_torch_devices(config: Config) -> None:
    """Raise ConfigError unless this machine has what the server and all devices of the configuration compute on."""
    server_torch_device(config)
    for group in {(one.torch_device, one.autocast): one for one in config.devices}.values():
        _found(config, group, "devices.torch_device")


def _found(config: Config, of: ServerSection | DeviceSection | DeviceSpec, what: str) -> TorchDevice:
    found = find_torch_device(of.torch_device, what, autocast=of.autocast == "bf16")
    found.check_dtype(config.model.dtype, what)
    return found


# --- memory


def accelerator_memory(config: Config, specs: Iterable[DeviceSpec]) -> tuple[int | None, dict[str, int]]:
    """Return the bytes of accelerators of this machine for the server, and for each device by name.

    Devices that compute on one accelerator share it equally; if the server does too, it has half of it. An accelerator
    of another machine has no limit here.
    """
    devices = {spec.name: place for spec in specs if (place := _place(spec)) is not None}
    users, server = Counter(devices.values()), _place(config.server)
    shares = {name: _memory(place) // users[place] // (2 if place == server else 1) for name, place in devices.items()}
    own = None if server is None else _memory(server) // (2 if users[server] else 1)
    return own or None, {name: share for name, share in shares.items() if share}


def _place(of: ServerSection | DeviceSpec) -> str | None:
    """Return the accelerator of this machine, with its number; None for the CPU, and if it is not here."""
    if of.torch_device == "cpu":
        return None
    with suppress(ConfigError):
        found = find_torch_device(of.torch_device, "")
        return None if found.is_cpu else f"{found.device.type}:{found.device.index or 0}"
    return None


def _memory(place: str) -> int:
    """Return the bytes of an accelerator; 0 if torch does not know them."""
    return TorchDevice(place).memory_bytes or 0
