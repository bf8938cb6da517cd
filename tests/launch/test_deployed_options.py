"""What a deployment makes of its configuration before anything connects."""

from __future__ import annotations

import tomllib

import pytest

from pipar.config_file import config_from, dump_config
from pipar.errors import ConfigError
from pipar.launch.deployed_device import DeviceOptions, device_workload
from pipar.launch.deployed_process import as_deployed, listed_specs
from pipar.wording import setting_text


def test_a_folder_with_data_beside_a_factory_is_refused() -> None:
    config = config_from({"data": {"factory": "mine:samples", "classes": 10, "shape": [1, 4, 4]}})
    with pytest.raises(ConfigError, match=r"--data /photos is given, but data\.factory = 'mine:samples' returns"):
        device_workload(config, DeviceOptions("pi", "127.0.0.1:1", data="/photos"))


def test_a_deployment_has_no_emulated_speeds_and_links_that_were_not_given() -> None:
    config = as_deployed(config_from({"devices": [{"name": "pi", "count": 2}, {"name": "slow", "speed": 0.5}]}))
    assert "speed = 0.05" not in dump_config(config)
    assert "speed 0.05" not in setting_text(config)
    again = config_from(tomllib.loads(dump_config(config)))
    assert [(one.name, one.speed, one.link) for one in listed_specs(again)] == [
        (one.name, one.speed, one.link) for one in listed_specs(config)
    ]
    assert [one.speed for one in listed_specs(again)] == [1.0, 1.0, 0.5]
    assert as_deployed(again) == as_deployed(as_deployed(again))
