"""Both parts of a cut network compute the gradients of the whole network, for any micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pipar import random_streams
from pipar.cutting.split import split_model
from pipar.errors import ProtocolError
from pipar.nn.device_part import TorchDevicePart
from pipar.nn.micro_batches import MicroBatch, cut_micro_batches
from pipar.nn.optimizers import sgd
from pipar.nn.server_part import TorchServerPart
from pipar.tasks.task import classification
from pipar.tensors.bodies import read_state, state_body, tensor_body
from pipar.wire.messages import Body, Kind, Message
from tests.support.labels import label_bytes

SGD = sgd(learning_rate=0.1, momentum=0.9)
LAYERS = 5


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One thread: with more, tiny networks mostly wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(12, 6),
            nn.Sequential(nn.Tanh(), nn.Linear(6, 4)),
        ).to(dtype)


def batch(samples: int = 10, dtype: torch.dtype = torch.float64, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 1, 4, 4, dtype=dtype, generator=generator)
    return inputs, torch.randint(0, 4, (samples,), generator=generator)


def parts(model: nn.Sequential, split_point: int) -> tuple[TorchDevicePart, TorchServerPart]:
    near, far = split_model(model, split_point)
    return TorchDevicePart(near, SGD, has_loss=len(far) == 0), TorchServerPart(far, SGD, task=classification(4))


def message(body: Body, n: int, piece: MicroBatch, kind: Kind = Kind.ACTIVATION) -> Message:
    return Message(kind, 1, 1, n, piece.samples, piece.batch_samples, body)


def accumulate(device: TorchDevicePart, server: TorchServerPart, pieces: list[MicroBatch]) -> None:
    """Run all forwards, then all backwards, through message bodies as in a real iteration."""
    gradients = []
    for n, piece in enumerate(pieces, start=1):
        activation = message(device.encode(device.forward(n, piece), piece, "raw"), n, piece)
        gradient = server.encode(server.backward(server.forward(server.decode(activation, "raw"))), "raw")
        gradients.append(message(gradient, n, piece, Kind.GRADIENT))
    for n, gradient_message in enumerate(gradients, start=1):
        device.backward(n, device.decode(gradient_message, "raw"))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def whole_batch_gradients(samples: int) -> tuple[dict[str, torch.Tensor], float]:
    model = network()
    inputs, labels = batch(samples)
    loss = F.cross_entropy(model(inputs), labels)
    torch.autograd.backward(loss)
    return gradients(model), loss.item()


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    largest = max(tensor.abs().max().item() for tensor in wanted.values())
    for name, tensor in wanted.items():
        assert (found[name] - tensor).abs().max().item() <= tolerance * largest, name


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(st.integers(1, LAYERS - 1), st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_uneven_micro_batches_accumulate_to_the_gradient_of_the_whole_batch(split_point: int, sizes: list[int]) -> None:
    model = network()
    device, server = parts(model, split_point)
    accumulate(device, server, cut_micro_batches(*batch(sum(sizes)), sizes))
    wanted, loss = whole_batch_gradients(sum(sizes))
    # Sums of about ten terms in float64: 1e-14 of the largest gradient is a few dozen rounding errors.
    assert_close(gradients(model), wanted, 1e-14)
    assert server.take_loss() / sum(sizes) == pytest.approx(loss, rel=1e-13)
    assert server.take_loss() == 0.0


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_a_device_with_the_whole_network_has_the_same_gradient_and_keeps_the_loss(sizes: list[int]) -> None:
    model = network()
    device, _ = parts(model, LAYERS)
    for n, piece in enumerate(cut_micro_batches(*batch(sum(sizes)), sizes), start=1):
        device.forward(n, piece)
        device.backward(n, None)
    wanted, loss = whole_batch_gradients(sum(sizes))
    assert_close(gradients(model), wanted, 1e-14)
    assert device.take_loss() / sum(sizes) == pytest.approx(loss, rel=1e-13)


@pytest.mark.parametrize("split_point", range(1, LAYERS))
def test_some_iterations_give_the_weights_of_plain_training(split_point: int) -> None:
    plain, cut = network(), network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    device, server = parts(cut, split_point)
    for iteration in range(5):
        inputs, labels = batch(9, seed=iteration)
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(plain(inputs), labels))
        optimizer.step()
        accumulate(device, server, cut_micro_batches(inputs, labels, [4, 3, 2]))
        device.step()
        server.step()
    assert_close(cut.state_dict(), plain.state_dict(), 1e-13)


def test_a_step_clears_the_gradients_that_it_applied() -> None:
    model = network()
    device, server = parts(model, 2)
    accumulate(device, server, cut_micro_batches(*batch(4), [4]))
    device.step()
    server.step()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_pass_through_a_part_without_weights() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4)).double()
    device, server = parts(model, 1)
    accumulate(device, server, cut_micro_batches(*batch(6), [3, 3]))
    device.step()
    server.step()
    assert read_state(device.pack()) == {}


def test_micro_batches_are_views_of_their_batch_in_order() -> None:
    inputs, labels = batch(7)
    pieces = cut_micro_batches(inputs, labels, [3, 2, 2])
    assert [piece.samples for piece in pieces] == [3, 2, 2]
    assert {piece.batch_samples for piece in pieces} == {7}
    assert torch.equal(torch.cat([piece.inputs for piece in pieces]), inputs)
    assert pieces[1].inputs.untyped_storage().data_ptr() == inputs.untyped_storage().data_ptr()


# --- momentum


@pytest.mark.parametrize("keep", [True, False])
def test_momentum_is_kept_or_reset_when_a_model_is_installed(keep: bool) -> None:
    def train_twice(*, install: bool) -> torch.Tensor:
        model = network()
        device, _ = parts(model, LAYERS)
        for seed in (1, 2):
            if seed == 2 and install:
                device.unpack_and_install(state_body(copy.deepcopy(device.state())), keep_state=keep)
            (piece,) = cut_micro_batches(*batch(6, seed=seed), [6])
            device.forward(1, piece)
            device.backward(1, None)
            device.step()
        return model[3].weight.detach().clone()

    assert torch.equal(train_twice(install=True), train_twice(install=False)) is keep


def test_an_installed_model_replaces_weights_and_buffers_bit_for_bit() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    device, _ = parts(model, 2)
    state = {name: tensor + 1 for name, tensor in device.state().items()}
    device.unpack_and_install(state_body(state), keep_state=False)
    assert all(torch.equal(device.state()[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("change", ["missing", "more", "shape"])
def test_a_model_that_does_not_fit_is_refused(change: str) -> None:
    device, _ = parts(network(), 2)
    state = dict(device.state())
    if change == "missing":
        del state["0.bias"]
    elif change == "more":
        state["9.weight"] = torch.zeros(1)
    else:
        state["0.bias"] = torch.zeros(7)
    with pytest.raises(ProtocolError, match="does not fit this part"):
        device.unpack_and_install(state_body(state), keep_state=False)


# --- messages that a peer may send


def activation_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, labels: int | None = None) -> Message:
    from pipar.tensors.bodies import tensor_body

    body = tensor_body(torch.zeros(shape, dtype=dtype), label_bytes(torch.zeros(labels or shape[0], dtype=torch.int64)))
    return Message(Kind.ACTIVATION, 1, 1, 1, shape[0], 10, body)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 13), torch.float64),
        ((2, 3, 2, 2), torch.float64),
        ((12,), torch.float64),
        ((2, 12), torch.float32),
        ((2, 2, 12), torch.float64),
    ],
    ids=str,
)
def test_activations_that_the_layers_do_not_take_are_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _, server = parts(network(), 3)  # takes (samples, 12) in float64
    with pytest.raises(ProtocolError, match="do not take activations of"):
        server.forward(server.decode(activation_of(shape, dtype), "raw"))
    server.forward(server.decode(activation_of((2, 12)), "raw"))  # the replica still works


@pytest.mark.parametrize(("epoch", "cause"), [(1, "its samples .* or the first weights"), (2, "has diverged")])
def test_activations_that_are_not_finite_are_refused_with_the_likely_cause(epoch: int, cause: str) -> None:
    _, server = parts(network(), 3)
    values = torch.zeros(2, 12, dtype=torch.float64)
    values[1, 3] = float("nan")
    piece = MicroBatch(values, torch.zeros(2, dtype=torch.int64), 2)
    said = replace(message(tensor_body(values, label_bytes(piece.targets)), 4, piece), epoch=epoch)
    with pytest.raises(ProtocolError, match=rf"^What the device has .* batch 1 of round {epoch} has values .* {cause}"):
        server.decode(said, "raw")


@pytest.mark.parametrize("shape", [(2, 3, 3, 3), (2, 3, 1, 4), (2, 12), (2, 6, 2, 2)], ids=str)
def test_activations_with_a_changed_shape_are_refused(shape: tuple[int, ...]) -> None:
    _, server = parts(network(), 1)
    server.forward(server.decode(activation_of((5, 3, 2, 2)), "raw"))
    server.forward(server.decode(activation_of((1, 3, 2, 2)), "raw"))  # the number of samples may change
    with pytest.raises(ProtocolError, match="a different shape or dtype"):
        server.decode(activation_of(shape), "raw")


def test_a_failure_that_the_peer_did_not_cause_is_raised_unchanged() -> None:
    _, server = parts(network(), 3)
    server.forward(server.decode(activation_of((2, 12)), "raw"))
    server.module.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        server.forward(server.decode(activation_of((2, 12)), "raw"))


def test_a_gradient_of_another_shape_is_refused() -> None:
    device, _ = parts(network(), 3)
    (piece,) = cut_micro_batches(*batch(2), [2])
    device.forward(1, piece)
    with pytest.raises(ProtocolError, match="A gradient of shape"):
        device.backward(1, torch.zeros(2, 13, dtype=torch.float64))


def test_labels_outside_the_classes_are_refused() -> None:
    device, server = parts(network(), 3)
    (piece,) = cut_micro_batches(*batch(2), [2])
    wrong = replace(piece, targets=torch.tensor([0, 4]))
    with pytest.raises(ProtocolError, match="label 4, but the highest label is 3"):
        server.decode(message(device.encode(device.forward(1, piece), wrong, "raw"), 1, piece), "raw")


@pytest.mark.parametrize(
    "body",
    [
        Body(20, encoding="raw"),
        Body(20, dtype="float32", shape=(100_000_000, 100), encoding="json"),
        Body(20, dtype="float32", shape=(2, 10**9), encoding="planes"),
        Body(2 * 12 * 8 + 8, dtype="float64", shape=(1, 24), encoding="planes"),
    ],
)
def test_a_body_that_is_no_tensor_is_refused_before_its_gradient_is_cut_into_chunks(body: Body) -> None:
    server = TorchServerPart(nn.Sequential(nn.Linear(12, 3)).double(), sgd(), task=classification(3))
    with pytest.raises(ProtocolError):
        server.chunk_bytes(Message(Kind.ACTIVATION, 1, 1, 1, 2, 2, body), "planes")


def test_rounding_depends_on_the_place_of_a_micro_batch() -> None:
    rounding = partial(random_streams.generator, 1, "rounding")
    part = TorchDevicePart(nn.Sequential(nn.Linear(4, 64)), sgd(), has_loss=False, rounding=rounding)
    piece = MicroBatch(torch.randn(2, 4), torch.zeros(2, dtype=torch.int64), 2)
    output = part.forward(1, piece)

    def coded(place: tuple[int, ...]) -> bytes:
        body = part.encode(output, piece, "int8", place)
        part._encoding_errors._lossy.clear()  # without residuals
        assert body.chunks is not None
        return b"".join(body.chunks.ready[0].buffers)

    assert coded((1, 2, 3)) == coded((1, 2, 3)) != coded((1, 2, 4))
