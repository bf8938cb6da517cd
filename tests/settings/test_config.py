"""The configuration: defaults as documented, a round trip through TOML, and one sentence for each mistake."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipar.errors import ConfigError
from pipar.launch.deployed_job import server_workload
from pipar.settings.config import Config, DeviceSection, device_specs
from pipar.settings.config_file import config_from, dump_config, load_config, with_settings
from pipar.settings.links import Link


def test_an_empty_configuration_trains_vgg5_with_group_norm_on_digits_with_pipar() -> None:
    config = config_from({})
    assert config == Config()
    assert (config.run.method, config.run.epochs, config.run.batch_size, config.run.seed) == ("pipar", 5, 100, 0)
    assert (config.model.name, config.model.norm, config.model.dtype) == ("vgg5", "group", "float32")
    assert config.data.name == "digits"
    assert (config.plan.split_point, config.plan.micro_batches) == ("auto", "auto")
    assert config.plan.schedule == "auto"
    assert config.wire.encoding == "auto"
    assert config.server.aggregator == "fedavg"


def test_the_default_optimizer_is_sgd_whose_momentum_is_reset_at_aggregation() -> None:
    optimizer = Config().optimizer
    assert (optimizer.name, optimizer.learning_rate, optimizer.momentum) == ("sgd", 0.01, 0.9)
    assert optimizer.state_at_aggregation == "reset"


def test_an_empty_configuration_has_four_devices_on_4g_at_a_twentieth_of_this_machine() -> None:
    devices = device_specs(Config())
    assert [device.name for device in devices] == ["device-1", "device-2", "device-3", "device-4"]
    assert {(device.link.up_bps, device.link.down_bps, device.speed) for device in devices} == {(10e6, 25e6, 0.05)}


@pytest.mark.parametrize(
    ("written", "link"),
    [
        ("4g", Link(up_bps=10e6, down_bps=25e6)),
        ("4g+", Link(up_bps=20e6, down_bps=40e6)),
        ("wifi", Link(up_bps=50e6, down_bps=50e6)),
        ("unlimited", Link()),
        ({"up": "10Mbit/s", "down": "25Mbit/s", "latency": "20ms"}, Link(up_bps=10e6, down_bps=25e6, latency_s=0.02)),
        ({"down": 5e6}, Link(down_bps=5e6)),
        ({}, Link()),
        (
            {"cycle": ["4g", {"up": "1Mbit/s"}], "every": "2min"},
            Link(
                up_bps=10e6,
                down_bps=25e6,
                cycle=(Link(up_bps=10e6, down_bps=25e6), Link(up_bps=1e6)),
                every_s=120.0,
            ),
        ),
    ],
)
def test_a_link_is_a_name_or_its_numbers(written: Any, link: Link) -> None:
    assert config_from({"devices": [{"link": written}]}).devices[0].link == link


def test_names_are_padded_so_that_they_sort_by_number() -> None:
    names = [spec.name for spec in device_specs(config_from({"devices": [{"name": "pi", "count": 12}]}))]
    assert names[:3] == ["pi-01", "pi-02", "pi-03"]
    assert names == sorted(names)


def test_a_group_of_one_keeps_its_name_and_groups_of_one_name_are_numbered_together() -> None:
    tree = {"devices": [{"name": "phone"}, {"name": "pi", "speed": 0.1}, {"name": "pi", "speed": 0.2}]}
    specs = device_specs(config_from(tree))
    assert [(spec.name, spec.speed) for spec in specs] == [("phone", 0.05), ("pi-1", 0.1), ("pi-2", 0.2)]


def test_a_device_takes_the_plan_of_its_group_before_that_of_the_run() -> None:
    tree = {"plan": {"split_point": 2, "micro_batches": 4}, "devices": [{"count": 1, "split_point": "auto"}]}
    (spec,) = device_specs(config_from(tree))
    assert (spec.split_point, spec.micro_batches) == ("auto", 4)


names = st.sampled_from(["a", "pi", "phone.1", "b-2"])
rates = st.one_of(st.none(), st.floats(1, 1e12))
steady_links = st.builds(Link, up_bps=rates, down_bps=rates, latency_s=st.floats(0, 10))
changing_links = st.builds(
    Link.changing,
    st.lists(st.builds(Link, up_bps=rates, down_bps=rates, latency_s=st.just(0.5)), min_size=1, max_size=3),
    st.floats(0.001, 1e6),
)
links = st.one_of(steady_links, changing_links)
plan_numbers = st.one_of(st.none(), st.just("auto"), st.integers(1, 100))
devices = st.builds(
    DeviceSection,
    name=names,
    count=st.integers(1, 9),
    link=links,
    speed=st.floats(1e-3, 10),
    split_point=plan_numbers,
    micro_batches=plan_numbers,
)


@pytest.mark.slow
@given(
    st.lists(devices, min_size=1, max_size=3, unique_by=lambda group: group.name),
    st.fixed_dictionaries(
        {},
        optional={
            "run": st.fixed_dictionaries({"epochs": st.integers(1, 99), "method": st.sampled_from(["fl", "sfl2"])}),
            "optimizer": st.fixed_dictionaries({"learning_rate": st.floats(1e-6, 10)}),
            "data": st.fixed_dictionaries({"shape": st.just((3, 8, 8)), "samples_per_device": st.integers(1, 10**6)}),
            "plan": st.fixed_dictionaries({"split_point": st.integers(1, 40)}),
        },
    ),
)
def test_a_configuration_reads_back_from_toml_unchanged(groups: list[DeviceSection], sections: dict[str, Any]) -> None:
    config = config_from({**sections, "devices": groups})
    assert _from_toml(dump_config(config)) == config


def _from_toml(text: str) -> Config:
    return config_from(tomllib.loads(text))


def test_a_dumped_file_loads_as_the_same_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    config = load_config(None, ["run.name=first", "devices.link=wifi", "data.samples_per_device=[1,2,3,4]"])
    path.write_text(dump_config(config), "utf-8")
    assert load_config(path) == config


MISTAKES = [
    ({"run": {"epochs": 0}}, "run.epochs = 0 is not allowed: it should be at least 1."),
    ({"run": {"epochs": 10**10}}, "run.epochs = 10000000000 is not allowed: it should be at most 1000000000."),
    ({"run": {"epochs": True}}, "run.epochs = True is not a number"),
    ({"run": {"epochs": 1.5}}, "run.epochs = 1.5 is not allowed: it should be a whole number."),
    ({"run": {"method": "fedsgd"}}, "run.method = 'fedsgd' is not known; allowed are pipar, fl, sl, sfl, sfl2."),
    ({"run": {"name": "../up"}}, "run.name = '../up' is not allowed: a name starts with a letter or a digit"),
    ({"run": {"name": 5}}, "run.name = 5 is not allowed: it should be text."),
    ({"run": {"epoch": 1}}, "'epoch' is not a key of [run]: did you mean 'epochs'?"),
    (
        {"privacy": {"epsilon": 1.0}},
        "'epsilon' is not a key of [privacy]: did you mean 'target_epsilon' or 'pixel_epsilon' or 'label_epsilon'?",
    ),
    ({"server": {"deadline": 1.0}}, "'deadline' is not a key of [server]: did you mean 'round_deadline'? Allowed"),
    ({"runs": {}}, "'runs' is not a key of the configuration: did you mean 'run'?"),
    ({"run": 5}, "run = 5 is not allowed: write a section [run] with its keys below it."),
    ({"model": {"name": "vgg6"}}, "model.name = 'vgg6' is not known (did you mean 'vgg16'?); allowed are vgg5,"),
    ({"model": {"name": "ResNet-18"}}, "model.name = 'ResNet-18' is not known (did you mean 'resnet18'?); allowed"),
    ({"model": {"name": 5}}, "model.name = 5 is not known; allowed are vgg5, resnet18"),
    ({"data": {"name": "minst"}}, "data.name = 'minst' is not known (did you mean 'mnist'?); allowed are digits,"),
    ({"data": {"name": "faces"}}, "data.name = 'faces' is not known; allowed are digits, mnist"),
    ({"model": {"norm": "layer"}}, "allowed are batch, group, none."),
    ({"model": {"dtype": "float16"}}, "model.dtype = 'float16' is not known; allowed are float32, float64."),
    ({"optimizer": {"learning_rate": 0}}, "optimizer.learning_rate = 0 is not allowed"),
    ({"optimizer": {"momentum": 1}}, "optimizer.momentum = 1 is not allowed: it should be less than 1."),
    ({"optimizer": {"momentum": True}}, "optimizer.momentum = True is not a number."),
    ({"optimizer": {"weight_decay": False}}, "optimizer.weight_decay = False is not a number."),
    (
        {"data": {"samples_per_device": [1, 2]}},
        "data.samples_per_device lists 2 sizes for 4 devices: give one for each.",
    ),
    ({"data": {"samples_per_device": 0}}, "data.samples_per_device = 0 is neither a whole number from 1 on nor a list"),
    ({"data": {"samples_per_device": [5, True]}}, "data.samples_per_device = [5, True] is neither"),
    (
        {"data": {"shape": [1, 2]}},
        "data.shape = [1, 2] is not the shape of an image, which digits has; write [channels, height, width]",
    ),
    ({"data": {"augment": "perhaps"}}, "data.augment = 'perhaps' is not allowed: it should be true or false."),
    ({"data": {"alpha": float("nan")}}, "data.alpha = nan is not allowed"),
    ({"plan": {"split_point": "soon"}}, "plan.split_point = 'soon' is neither 'auto' nor a whole number."),
    ({"plan": {"split_point": True}}, "plan.split_point = True is neither 'auto' nor a whole number."),
    (
        {"plan": {"micro_batches": 0}},
        "plan.micro_batches = 0 is less than 1; give a whole number from 1 on, or 'auto'.",
    ),
    ({"plan": {"micro_batches": -4}}, "plan.micro_batches = -4 is less than 1"),
    ({"plan": {"split_point": 0}}, "plan.split_point = 0 is less than 1"),
    ({"wire": {"encoding": "zip"}}, "wire.encoding = 'zip' is not known"),
    ({"server": {"listen": "here"}}, "server.listen = 'here' is not allowed"),
    ({"server": {"listen": "here:99999"}}, "a port from 0 to 65535"),
    ({"server": {"aggregator": "best"}}, "server.aggregator = 'best' is not known: allowed are fedavg, fedprox,"),
    ({"server": {"aggregator": "fedadm"}}, "server.aggregator = 'fedadm' is not known: did you mean 'fedadam'?"),
    ({"server": {"aggregator": 3}}, "server.aggregator = 3 is not allowed: it should be text."),
    (
        {"server": {"allow": 5}},
        'server.allow = 5 is not allowed: write the names of devices, as in ["pi-1", "pi-2"], or',
    ),
    (
        {"server": {"allow": ["a", "b"], "min_devices": 3}},
        "server.min_devices = 3, but server.allow names only 2 devices, so the training would never start",
    ),
    ({"server": {"allow": []}}, "server.allow = [] is not allowed: write the names of devices"),
    ({"server": {"aggregation": 5}}, "server.aggregation = 5 is not allowed: write [server.aggregation] with"),
    (
        {"server": {"aggregator": "a:b", "aggregation": {"f": print}}},
        "for 'f', which a configuration file cannot contain.",
    ),
    (
        {"server": {"aggregation": {"proximal": 0.1}}},
        "server.aggregation.proximal = 0.1 does not belong to fedavg, which has no parameters.",
    ),
    (
        {"server": {"aggregator": "fedadam", "aggregation": {"proximal": 0.1}}},
        "does not belong to fedadam, whose parameters are server_learning_rate, beta1, beta2, tau.",
    ),
    (
        {"run": {"method": "sl"}, "server": {"aggregator": "median"}},
        "sl trains one device at a time and hands its model on, so there is nothing that server.aggregator = 'median'",
    ),
    ({"run": {"method": "sl"}, "server": {"aggregator": "a:b"}}, "sl trains one device at a time"),
    (
        {"server": {"aggregator": "krum"}},
        "krum with byzantine = 1 needs at least 5 devices, but there are 4: give",
    ),
    (
        {"server": {"aggregator": "krum", "aggregation": {"byzantine": 1, "selected": 5}}, "devices": [{"count": 5}]},
        "krum can select at most 4 of 5 devices with byzantine = 1, but selected = 5: give a smaller",
    ),
    (
        {"server": {"aggregator": "trimmed_mean", "aggregation": {"trim": 0.3}}},
        "trimmed_mean with trim = 0.3 leaves out 2 of 4 devices at each end, so that none is left: give more",
    ),
    ({"devices": []}, "devices = [] is not allowed"),
    ({"devices": 5}, "devices = 5 is not allowed: write [[devices]] with its keys below it"),
    ({"devices": [1]}, "devices = [1] is not allowed: write [[devices]]"),
    ({"devices": {"count": 3}}, "devices = {'count': 3} is not allowed: write [[devices]]"),
    ({"devices": [{"colour": 1}]}, "'colour' is not a key of [devices]: allowed are name, count"),
    ({"devices": [{"micro_batches": 0}]}, "devices.micro_batches = 0 is less than 1"),
    ({"devices": [{"speed": float("inf")}]}, "devices.speed = inf is not allowed"),
    ({"devices": [{"memory": "much"}]}, "devices.memory = 'much' is not an amount of memory; write a size above 0"),
    ({"devices": [{"memory": 0}]}, "devices.memory = 0 is not an amount of memory"),
    ({"devices": [{"memory": True}]}, "devices.memory = True is not an amount of memory"),
    ({"devices": [{"memory": float("inf")}]}, "devices.memory = inf is not an amount of memory"),
    ({"devices": [{"name": "a b"}]}, "devices.name = 'a b' is not allowed"),
    ({"devices": [{"link": "5g"}]}, "devices.link = '5g' is not a link; there are 4g, 4g+, wifi, unlimited"),
    ({"devices": [{"link": {"up": -1}}]}, "devices.link.up = -1.0 is not allowed: it should be greater than 0."),
    ({"devices": [{"link": {"down": float("inf")}}]}, "devices.link.down = inf is not allowed"),
    ({"devices": [{"link": {"up": "fast"}}]}, "'fast' is not a rate; write it like '10Mbit/s'"),
    ({"devices": [{"link": {"up": [1]}}]}, "'[1]' is not a rate"),
    ({"devices": [{"link": {"latency": "-1s"}}]}, "'-1s' is not a duration"),
    ({"devices": [{"link": "wify"}]}, "devices.link = 'wify' is not a link (did you mean 'wifi'?); there are 4g, 4g+"),
    ({"devices": [{"link": "WiFi"}]}, "devices.link = 'WiFi' is not a link (did you mean 'wifi'?)"),
    (
        {"devices": [{"link": {"cycle": ["4g"]}}]},
        "devices.link = {'cycle': ['4g']} has no 'every', which says how long each link of the cycle stays; write {",
    ),
    ({"devices": [{"link": {"every": "60s"}}]}, "has no list of links in 'cycle'; write {cycle = "),
    ({"devices": [{"link": {"cycle": [], "every": "1s"}}]}, "has no list of links in 'cycle'; write {cycle = "),
    ({"devices": [{"link": {"cycle": "4g", "every": "1s"}}]}, "has no list of links in 'cycle'; write {cycle = "),
    (
        {"devices": [{"link": {"cycle": ["4g", "5g"], "every": "1s"}}]},
        "has '5g' in its cycle, which is not a link; there are 4g, 4g+, wifi",
    ),
    (
        {"devices": [{"link": {"cycle": ["4g"], "evry": "1s"}}]},
        "has an unknown key 'evry' (did you mean 'every'?); the keys are cycle, every; write {cycle = ",
    ),
    (
        {"devices": [{"link": {"upp": "1Mbit/s"}}]},
        "has an unknown key 'upp' (did you mean 'up'?); the keys are up, down, latency; write a name or {up = ",
    ),
    (
        {"devices": [{"link": {"cycle": ["4g"], "every": "60"}}]},
        "has a wrong 'every': '60' has no unit; write a duration like '20ms' (units: us, ms, s, min, h).",
    ),
    ({"devices": [{"link": {"down": "25"}}]}, "has a wrong 'down': '25' has no unit; write a rate like '10Mbit/s'"),
    (
        {"devices": [{"link": {"cycle": ["4g", {"up": "5"}], "every": "1s"}}]},
        "has {'up': '5'} in its cycle, which has a wrong 'up': '5' has no unit",
    ),
    ({"devices": [{"link": 5}]}, "devices.link = 5 is not a link; write a name or {up = "),
    ({"devices": [{"link": {"cycle": ["4g"], "every": 0}}]}, "changes every 0 s; give at least '1ms'."),
    ({"devices": [{"link": {"cycle": ["4g"], "every": "often"}}]}, "'often' is not a duration"),
    (
        {"devices": [{"link": {"cycle": ["4g", {"latency": "5ms"}], "every": "1s"}}]},
        "has links of different latencies; only the rates of a link can change.",
    ),
    (
        {"devices": [{"link": {"cycle": [{"cycle": ["4g"], "every": "1s"}], "every": "1s"}}]},
        "is not a link; write a name",
    ),
    ({"plan": {"replan": "perhaps"}}, "plan.replan = 'perhaps' is not allowed: it should be true or false."),
    ({"task": {"ignore_index": 2**31}}, "task.ignore_index = 2147483648 is not allowed"),
    ({"task": {"ignore_index": -(2**40)}}, "task.ignore_index = -1099511627776 is not allowed"),
    ({"devices": [{"name": "x", "count": 2}, {"name": "x-1"}]}, "Two devices are called 'x-1'"),
]


@pytest.mark.parametrize(("tree", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_a_mistake_is_one_sentence_that_says_what_was_given(tree: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_from(tree)
    message = str(raised.value)
    assert says in message
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("setting", "section", "key", "value"),
    [
        ("run.epochs=3", "run", "epochs", 3),
        ("run.method=fl", "run", "method", "fl"),
        ('run.method="fl"', "run", "method", "fl"),
        (" run.seed = 7 ", "run", "seed", 7),
        ("data.augment=true", "data", "augment", True),
        ("plan.split_point=auto", "plan", "split_point", "auto"),
        ("optimizer.learning_rate=1e-3", "optimizer", "learning_rate", 0.001),
        ("data.shape=[1, 8, 8]", "data", "shape", (1, 8, 8)),
        ("server.aggregator=a.b:c", "server", "aggregator", "a.b:c"),
    ],
)
def test_a_setting_overrides_the_default(setting: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(load_config(None, [setting]), section), key) == value


def test_a_setting_overrides_the_file_and_earlier_settings(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[run]\nepochs = 2\nseed = 9\n", "utf-8")
    run = load_config(path, ["run.epochs=3", "run.epochs=4"]).run
    assert (run.epochs, run.seed) == (4, 9)


def test_memory_is_a_size_in_bytes_and_without_it_there_is_no_limit() -> None:
    config = config_from({"devices": [{"name": "a", "memory": "800MiB"}, {"name": "b", "memory": 5e8}, {"name": "c"}]})
    assert [spec.memory_bytes for spec in device_specs(config)] == [800 * 2**20, 500_000_000, None]
    assert config_from(tomllib.loads(dump_config(config))) == config


def test_a_setting_for_devices_applies_to_every_group(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[[devices]]\nname = "a"\n[[devices]]\nname = "b"\nlink = "4g"\n', "utf-8")
    groups = load_config(path, ["devices.link=wifi", "devices.speed=0.5"]).devices
    assert [(group.name, group.link.up_bps, group.speed) for group in groups] == [("a", 50e6, 0.5), ("b", 50e6, 0.5)]


def test_a_setting_for_devices_without_a_file_applies_to_the_default_four() -> None:
    assert len(device_specs(load_config(None, ["devices.link=unlimited"]))) == 4
    assert len(device_specs(load_config(None, ["devices.count=7"]))) == 7
    link = load_config(None, ['devices.link={up = "1Mbit/s", latency = "5ms"}']).devices[0].link
    assert link == Link(up_bps=1e6, latency_s=0.005)


@pytest.mark.parametrize("devices", ["[devices]\ncount = 3", "devices = 5", "devices = [1]"])
def test_a_setting_for_devices_that_are_not_groups_is_one_sentence(tmp_path: Path, devices: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(devices, "utf-8")
    with pytest.raises(ConfigError, match=r"write \[\[devices\]\]"):
        load_config(path, ["devices.speed=0.5"])


@pytest.mark.parametrize("setting", ["run=5", "epochs=1", "run.", "run.epochs", "=", "", ".epochs=1x"])
def test_an_invalid_setting_is_one_sentence(setting: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, [setting])
    assert "\n" not in str(raised.value)


def test_a_file_that_is_missing_or_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot read the configuration .*gone\.toml"):
        load_config(tmp_path / "gone.toml")
    (tmp_path / "torn.toml").write_text("[run", "utf-8")
    with pytest.raises(ConfigError, match=r"torn\.toml is not valid TOML"):
        load_config(tmp_path / "torn.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml is not valid TOML"):
        load_config(tmp_path / "binary.toml")


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().run.epochs = 3


def test_the_parameters_of_an_aggregator_are_a_separate_table() -> None:
    config = load_config(None, ["server.aggregator=fedadam", "server.aggregation.beta1=0.5"])
    assert config.server.aggregation == {"beta1": 0.5}
    assert _from_toml(dump_config(config)) == config
    assert with_settings(config, ["server.aggregation.tau=0.1"]).server.aggregation == {"beta1": 0.5, "tau": 0.1}


def test_a_setting_below_a_value_that_is_not_a_table_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^server\.aggregator = \{'x': 1\} is not allowed: it should be text\.$"):
        load_config(None, ["server.aggregator.x=1"])
    with pytest.raises(ConfigError, match=r"^server = 5 is not allowed: write a section \[server\]"):
        load_config(None, ["server.aggregation.x=1"], {"server": 5})


@pytest.mark.parametrize(
    ("server", "proximal"),
    [({}, 0.0), ({"aggregator": "fedprox"}, 0.01), ({"aggregator": "fedprox", "aggregation": {"proximal": 2}}, 2.0)],
)
def test_only_fedprox_has_a_proximal_term(server: dict[str, Any], proximal: float) -> None:
    assert config_from({"server": server}).server.proximal == proximal
    own = {"aggregator": "mine:make", "aggregation": {"proximal": 3}}
    assert config_from({"server": own}).server.proximal == 0.0


def test_a_device_with_its_own_profile_runs_at_the_speed_of_the_profile() -> None:
    groups = config_from({"devices": [{"profile": "board.json"}, {"name": "half", "profile": "b.json", "speed": 0.5}]})
    assert [spec.speed for spec in device_specs(groups)] == [1.0, 0.5]


def test_samples_of_a_factory_have_any_shape_and_a_server_without_data_makes_blank_ones() -> None:
    given = {"factory": "mine:samples", "shape": [2, 64], "classes": 3}
    config = config_from({"data": given, "model": {"factory": "mine:network"}})
    assert (config.data.shape, config.data.image_shape) == ((2, 64), None)
    assert server_workload(config).samples.input_shape == (2, 64)
