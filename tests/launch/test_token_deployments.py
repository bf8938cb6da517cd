"""Deployments on samples that are integers, tuples or dictionaries: what the server knows, and whole trainings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.credentials import certs
from support.deployments import RULES, check_nothing_is_left, check_weights, training
from support.programs import Place, address_of, place
from support.texts import LENGTH, VOCABULARY, next_token_loss

from pipar.errors import ConfigError, DataError, OtherNetworkError
from pipar.events import ignore
from pipar.job.workload import Workload
from pipar.launch import deployed_device
from pipar.launch.deployed_device import DeviceOptions, device_workload
from pipar.launch.deployed_job import check_validation_set, server_workload, validation_batches
from pipar.server.device_messages import Expected, read_hello
from pipar.server.session import fault
from pipar.settings.config_file import config_from, config_tree, dump_config, load_config
from pipar.storage.checkpoint import identity_of
from pipar.tensors.inputs import InputForm, TensorForm
from pipar.wire.messages import Kind, Message, TargetSize, json_body

TOKENS = {"shape": [5], "dtype": "int64", "highest": 29}
MASK = {"shape": [5], "dtype": "int64", "highest": 1}
MESSAGE = {"input_ids": TOKENS, "attention_mask": MASK}
DECLARED: dict[str, Any] = {
    "messages": MESSAGE,
    "verses": {"shape": [LENGTH], "dtype": "int64", "highest": VOCABULARY - 1},
    "pairs": [{"shape": [4], "dtype": "int64", "highest": 29}, {"shape": [2]}],
}
NETWORKS = {"messages": "encoder", "verses": "predictor", "pairs": "Pair"}
FORMS = {
    "messages": "attention_mask 5 (int64), input_ids 5 (int64)",
    "verses": "6 (int64)",
    "pairs": "(4 (int64), 2)",
}


def tree_of(kind: str, inputs: Any = None, **data: Any) -> dict[str, Any]:
    """Return a deployment of two devices with these samples; with `inputs`, the server has no validation set."""
    tree = training(epochs=2)
    apart = "" if inputs is None else "_apart"
    tree["data"] = {"factory": f"support.texts:{kind}{apart}", **({} if inputs is None else {"inputs": inputs}), **data}
    tree["model"] = {"factory": f"support.texts:{NETWORKS[kind]}", "dtype": "float64"}
    tree["devices"] = [{"name": "pi", "count": 2}]
    return tree | ({"task": {"loss": "next_token"}} if kind == "verses" else {})


def device_of(tree: dict[str, Any], name: str = "pi-1") -> Workload:
    return device_workload(config_from(tree), DeviceOptions(name, "127.0.0.1:1"))


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("is_declared", [False, True], ids=["by validation", "declared"])
def test_server_and_device_agree_on_samples_and_targets_without_seeing_each_others(
    kind: str, is_declared: bool
) -> None:
    tree = tree_of(kind, DECLARED[kind] if is_declared else None)
    server, device = server_workload(config_from(tree)), device_of(tree)
    device.samples.check_samples()
    assert str(server.samples.form) == str(device.samples.form) == FORMS[kind]
    assert server.samples.form == device.samples.form
    assert server.task.size == device.task.size
    assert server.task.classes == device.task.classes == (VOCABULARY if kind == "verses" else 3)
    at_server, on_device = server.checked_model(), device.checked_model(initial=False)
    assert [name for name, _ in at_server.named_parameters()] == [name for name, _ in on_device.named_parameters()]
    assert len(at_server) == len(on_device) > 1
    assert len(validation_batches(server)) == (0 if is_declared else 1)


def test_a_declared_form_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    for kind, inputs in DECLARED.items():
        config = config_from(tree_of(kind, inputs))
        (tmp_path / "train.toml").write_text(dump_config(config))
        again = load_config(tmp_path / "train.toml")
        assert again == config
        assert config_tree(again)["data"]["inputs"] == inputs
        assert identity_of(config) == identity_of(config_from(tree_of(kind, inputs, classes=None)))


def test_a_declared_form_has_the_range_of_integers_in_the_order_of_names() -> None:
    inputs = {"b": {"shape": [2], "dtype": "int16", "lowest": -3, "highest": 7}, "a": {"shape": [], "dtype": "bool"}}
    form = server_workload(config_from(tree_of("messages", inputs))).samples.form
    assert form == InputForm((TensorForm((), torch.bool), TensorForm((2,), torch.int16)), ("a", "b"))
    assert [(one.low, one.high) for one in form.tensors] == [(0, 1), (-3, 7)]


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (5, "data.inputs = 5 is not allowed: write { shape"),
        ([], "data.inputs = [] is not allowed: write"),
        ({"shape": 5}, "the shape of the tensor is 5; write its sides"),
        ({"shape": [0]}, "the shape of the tensor is [0]"),
        ({"shape": [5], "dtype": "float32"}, "the dtype of the tensor is 'float32'; allowed are bool, int8"),
        ({"shape": [5], "dtype": "int64"}, "the tensor has no highest; give the highest integer"),
        ({"shape": [5], "highest": 3}, "the tensor has a range but no dtype"),
        ({"shape": [5], "dtype": "int8", "highest": 300}, "values from 0 to 300, which is no range of int8"),
        ({"shape": [5], "dtype": "int8", "lowest": 3, "highest": 2}, "values from 3 to 2"),
        ({"shape": [5], "max": 3}, "the tensor is {'shape': [5], 'max': 3}; write"),
        ([{"shape": [5]}, 7], "tensor 1 is 7; write"),
        ({"input_ids": {"dtype": "int64"}}, "the shape of 'input_ids' is None"),
    ],
)
def test_a_declared_form_that_cannot_be_read_is_refused(inputs: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        config_from(tree_of("messages", inputs))
    assert str(refused.value).startswith("data.inputs = ")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"inputs": TOKENS}, "data.inputs says what the samples of data.factory are, but there is no data.factory."),
        ({"inputs": TOKENS, "factory": "a:b", "shape": [5]}, "but there is also data.shape, which is for one tensor"),
    ],
)
def test_a_declared_form_is_only_for_a_factory_and_takes_the_place_of_a_shape(data: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        config_from({"data": data})


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (
            {**MESSAGE, "input_ids": {**TOKENS, "shape": [9]}},
            "but data.inputs says attention_mask 5 (int64), input_ids 9",
        ),
        ({"input_ids": TOKENS}, "but data.inputs says input_ids 5 (int64): correct one of them"),
        ({**MESSAGE, "input_ids": {**TOKENS, "highest": 20}}, "which is outside of the range that data.inputs gives"),
        (
            TOKENS,
            "the data of pi-1 has samples of attention_mask 5 (int64), input_ids 5 (int64), but data.inputs says 5",
        ),
    ],
)
def test_a_device_whose_data_is_not_as_declared_does_not_connect(
    inputs: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployed_device, "prepare_process", lambda _: None)
    monkeypatch.setattr(deployed_device, "connect", pytest.fail)
    with pytest.raises(DataError, match=re.escape(says)):
        deployed_device.take_part(
            config_from(tree_of("messages", inputs)), DeviceOptions("pi-1", "127.0.0.1:1"), ignore
        )


def test_samples_that_are_not_as_declared_are_refused_on_one_machine_too() -> None:
    tree = tree_of("messages", {**MESSAGE, "input_ids": {**TOKENS, "shape": [9]}})
    with pytest.raises(DataError, match=r"the data of pi-1 has samples of .*, but data\.inputs says"):
        Workload(config_from(tree)).samples.check_samples()


def test_a_validation_set_that_does_not_fit_ends_the_server_before_the_network_is_measured() -> None:
    tree = tree_of("messages")
    tree["data"]["inputs"] = {"input_ids": TOKENS}
    with pytest.raises(DataError, match=r"^the validation set has samples of attention_mask .*, but data\.inputs says"):
        check_validation_set(server_workload(config_from(tree)))


# --- joining

EXPECTED = Expected(inputs=FORMS["messages"], targets=TargetSize(4))


def hello(**content: Any) -> Message:
    return Message(Kind.HELLO, body=json_body({"name": "pi-1", "samples": 9, **content}))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            {"inputs": FORMS["verses"]},
            f"'pi-1' has samples of 6 (int64), but the server expects samples of {FORMS['messages']}",
        ),
        ({"inputs": 7}, "'pi-1' has samples of 7, but"),
        (
            {"inputs": FORMS["messages"], "target_bytes": 12},
            "'pi-1' sends 12 bytes of targets for each sample, but the",
        ),
        ({"target_bytes": "much"}, "'pi-1' sends 'much' bytes of targets"),
    ],
)
def test_a_device_with_other_samples_or_targets_is_refused_for_good(content: dict[str, Any], says: str) -> None:
    with pytest.raises(OtherNetworkError, match=re.escape(says)) as refused:
        read_hello(hello(**content), EXPECTED, None)
    told = json.loads(bytes(fault(refused.value).body.contiguous()))
    assert told["other_network"] is True


def test_a_device_with_the_same_samples_or_of_an_earlier_version_joins() -> None:
    for content in ({}, {"inputs": FORMS["messages"], "target_bytes": 4}):
        assert read_hello(hello(**content), EXPECTED, None).name == "pi-1"
    assert read_hello(hello(inputs="anything", target_bytes=4), replace(EXPECTED, inputs=""), None).name == "pi-1"


# --- whole trainings


@pytest.fixture
def here(tmp_path: Path, profiles: Path) -> Iterator[Place]:
    with place(tmp_path, profiles, training()) as made:
        yield made


@pytest.mark.slow
def test_an_encoder_with_masks_trains_over_tls_and_another_device_is_refused(
    here: Place,
) -> None:
    certs("init", "--folder", str(here.folder / "certs"), "--host", "train.local")
    certs("issue", "pi-1", "pi-2", "guest", "--folder", str(here.folder / "certs"))
    tree = tree_of("messages", MESSAGE)
    tree["plan"] = {"split_point": 9}  # where a mask crosses, too; the number of micro-batches is planned
    tree["server"]["min_devices"] = 2
    here.write(tree)
    other = json.loads(json.dumps(tree))
    other["data"] = {"factory": "support.texts:longer_messages"}
    here.write(other, "other.toml")
    server = here.server("--certs", "certs")
    address = address_of(server)
    first = here.device("pi-1", address, "--certs", "certs")
    server.says("pi-1 joined")
    guest = here.device("guest", address, "--certs", "certs", config="other.toml")
    assert guest.ends() == 2
    assert "'guest' has samples of attention_mask 7 (int64), input_ids 7 (int64), but the" in guest.lines()[-1]
    second = here.device("pi-2", address, "--certs", "certs")
    assert [program.ends() for program in (server, first, second)] == [0, 0, 0]
    assert len(here.rounds()) == 2
    check_weights(here, tree)
    check_nothing_is_left(here)


@pytest.mark.slow
def test_tokens_train_over_a_crash_of_the_server_which_knows_them_by_its_validation_set(here: Place) -> None:
    tree = tree_of("verses")
    tree["run"]["epochs"] = 40  # enough for the server to be held during the training
    tree["plan"] = {"split_point": 1, "micro_batches": 3}
    tree["server"]["min_devices"] = 2
    here.write(tree)
    server = here.server()
    address = address_of(server)
    devices = [here.device(name, address) for name in ("pi-1", "pi-2")]
    server.says("round 1 saved")
    here.hold("server")
    here.wait_until_held("server")
    server.kill()
    here.let_go("server")
    again = here.server("--resume", listen=address)
    assert 1 <= int(again.says(r"resuming after round (\d+)")[1]) < 40
    assert [program.ends() for program in (again, *devices)] == [0, 0, 0]
    check_weights(here, tree, replace(RULES, loss=next_token_loss))
    assert all("val_loss" in epoch for epoch in here.result()["epochs"])
    check_nothing_is_left(here)
