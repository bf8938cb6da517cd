"""Which device of torch the server and each device compute on, by the configuration and by what this machine has."""

from __future__ import annotations

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


def check_torch_devices(config: Config) -> None:
    """Raise ConfigError unless this machine has what the server and all devices of the configuration compute on."""
    server_torch_device(config)
    for group in {(one.torch_device, one.autocast): one for one in config.devices}.values():
        _found(config, group, "devices.torch_device")


def _found(config: Config, of: ServerSection | DeviceSection | DeviceSpec, what: str) -> TorchDevice:
    found = find_torch_device(of.torch_device, what, autocast=of.autocast == "bf16")
    found.check_dtype(config.model.dtype, what)
    return found
