"""The allowed contents of a message's body, and what is refused."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipar.errors import ProtocolError
from pipar.methods import Plan
from pipar.settings.values import MOST_EPOCHS
from pipar.wire.messages import Body, Kind, Message, json_body, read_json, tensor_bytes
from pipar.wire.orders import Orders, plan_body

ORDERS = Orders(
    session=3,
    plan=Plan(2, 4, 3),
    layers=5,
    batch_size=100,
    batch_statistics=False,
    keep_state=True,
    proximal=0.25,
)


def activation(samples: int = 3, shape: tuple[int, ...] = (3, 2), dtype: str = "float32", size: int = 36) -> Message:
    """3 samples of 2 float32 each and 3 labels: 24 + 12 bytes."""
    return Message(Kind.ACTIVATION, 1, 1, 1, samples, 10, Body.of(bytes(size), dtype=dtype, shape=shape))


def test_the_tensor_of_an_activation_comes_before_its_labels() -> None:
    assert tensor_bytes(activation()) == 24
    assert tensor_bytes(activation(dtype="float64", size=60)) == 48


def test_a_gradient_has_no_labels() -> None:
    assert tensor_bytes(replace(activation(size=24), kind=Kind.GRADIENT)) == 24


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (activation(size=26), "carries 26 bytes"),
        (activation(size=24), "carries 24 bytes"),
        (activation(dtype="float64"), "float64 of shape"),
        (activation(dtype=""), "no dtype"),
        (activation(shape=(3, 3)), "carries 36 bytes"),
        (activation(samples=2, size=32), "says 2 samples, but its shape is"),
        (activation(samples=0, size=24), "says 0 samples"),
        (activation(samples=0, shape=(0, 2), size=0), "says 0 samples"),
        (activation(samples=1, shape=(), size=8), "says 1 samples, but its shape is"),
        (activation(shape=(2**32 - 1,) * 255), "carries 36 bytes"),
        (replace(activation(), body=replace(activation().body, encoding="json")), "carries 36 bytes"),
    ],
    ids=str,
)
def test_a_tensor_that_contradicts_its_header_is_refused(message: Message, sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        tensor_bytes(message)


@pytest.mark.slow
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_json_is_restored_equal(value: object) -> None:
    content = {"a": value}
    assert read_json(Message(Kind.HELLO, body=json_body(content))) == content


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe\x00", b"[1]", b"3", b"null", b"[" * 100_000, b"9" * 5000])
def test_a_control_message_without_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_json(Message(Kind.HELLO, body=Body.of(data, encoding="json")))


@given(st.binary(max_size=40))
def test_any_bytes_are_a_json_object_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(read_json(Message(Kind.HELLO, body=Body.of(data))), dict)


def test_a_body_of_one_buffer_is_not_copied_and_several_are_joined() -> None:
    one = Body.of(struct.pack("<2i", 1, 2))
    assert one.contiguous() is one.buffers[0]
    several = Body.of(b"ab", b"", memoryview(b"cd"))
    assert (bytes(several.contiguous()), several.size_bytes, len(several.buffers)) == (b"abcd", 4, 2)


def test_only_a_body_with_a_size_and_no_bytes_has_sizes_only() -> None:
    assert Body(5).is_size_only
    assert not Body().is_size_only
    assert not Body.of(b"x").is_size_only


def test_orders_are_restored_equal() -> None:
    assert Orders.read(Message(Kind.WELCOME, body=ORDERS.to_body())) == ORDERS


@pytest.mark.parametrize("rare", [{"learning_rate": 3.0}, {"learning_rate": 0.0}, {"epochs": MOST_EPOCHS}], ids=str)
def test_orders_that_are_rare_are_restored_equal(rare: dict[str, Any]) -> None:
    orders = replace(ORDERS, **rare)
    assert Orders.read(Message(Kind.WELCOME, body=orders.to_body())) == orders


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf")])
def test_a_welcome_with_a_learning_rate_that_is_not_a_positive_number_is_refused(rate: float) -> None:
    with pytest.raises(ProtocolError, match="learning rate"):
        Orders.read(Message(Kind.WELCOME, body=replace(ORDERS, learning_rate=rate).to_body()))


WELCOME = read_json(Message(Kind.WELCOME, body=ORDERS.to_body()))


@pytest.mark.parametrize("key", WELCOME)
def test_a_welcome_without_one_of_its_keys_is_refused(key: str) -> None:
    lacking = {name: value for name, value in WELCOME.items() if name != key}
    with pytest.raises(ProtocolError, match="does not have the fields of this pipar version"):
        Orders.read(Message(Kind.WELCOME, body=json_body(lacking)))


@pytest.mark.parametrize(
    "change",
    [{"more": 1}, {"plan": 1}, {"layers": "5"}, {"layers": True}, {"batch_statistics": 0}, {"schedule": None}],
    ids=str,
)
def test_a_welcome_with_an_invalid_value_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="does not have the fields of this pipar version"):
        Orders.read(Message(Kind.WELCOME, body=json_body({**WELCOME, **change})))


@pytest.mark.parametrize("key", ["split_point", "micro_batches", "layers", "batch_size"])
def test_a_welcome_with_a_count_of_zero_is_refused(key: str) -> None:
    with pytest.raises(ProtocolError, match=f"{key} = 0; it has to be at least 1"):
        Orders.read(Message(Kind.WELCOME, body=json_body({**WELCOME, key: 0})))


@pytest.mark.parametrize("proximal", [-0.1, float("nan"), float("inf")])
def test_a_welcome_with_a_proximal_weight_that_is_not_a_positive_number_is_refused(proximal: float) -> None:
    with pytest.raises(ProtocolError, match="proximal weight"):
        Orders.read(Message(Kind.WELCOME, body=replace(ORDERS, proximal=proximal).to_body()))


@pytest.mark.parametrize("noise", [{"clip": 1e-320}, {"clip": 0.0}, {"clip": 1e300}, {"noise_multiplier": 1e-160}])
def test_a_welcome_with_noise_that_is_rounded_away_is_refused(noise: dict[str, float]) -> None:
    """Below the normal numbers, sigma C is rounded to less noise than is counted."""
    orders = replace(ORDERS, keep_state=False, **{"noise_multiplier": 1.0, **noise})
    with pytest.raises(ProtocolError, match="it has to be from 1e-100 to"):
        Orders.read(Message(Kind.WELCOME, body=orders.to_body()))


@pytest.mark.parametrize("plan", [Plan(1, 1), Plan(5, 7, 3)])
def test_a_plan_changes_nothing_else_in_the_orders(plan: Plan) -> None:
    message = Message(Kind.PLAN, 1, body=plan_body(plan))
    assert replace(ORDERS, layers=5).changed_by(message) == replace(ORDERS, layers=5, plan=plan)


PLAN = {"split_point": 2, "micro_batches": 3, "window": 0, "up": "raw", "down": "raw"}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({}, "does not have the fields of a plan"),
        ({**PLAN, "more": 1}, "does not have the fields of a plan"),
        ({**PLAN, "window": True}, "does not have the fields of a plan"),
        ({**PLAN, "micro_batches": "3"}, "does not have the fields of a plan"),
        ({**PLAN, "split_point": 6}, "P=6 N=3, which does not fit a network of 5 layers"),
        ({**PLAN, "split_point": 0}, "which does not fit a network of"),
        ({**PLAN, "micro_batches": 0}, "which does not fit a network of"),
        ({**PLAN, "window": -1}, "which does not fit a network of"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(content: dict[str, object], sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        replace(ORDERS, layers=5).changed_by(Message(Kind.PLAN, 1, body=json_body(content)))
