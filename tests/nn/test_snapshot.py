"""Training that resumes from a snapshot is the same, bit for bit, as without an interruption."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from torch import nn

from pipar.cutting.split import split_model
from pipar.errors import InputError
from pipar.nn.device_part import TorchDevicePart
from pipar.nn.learner import LearnerSettings, TorchLearner
from pipar.nn.micro_batches import Decoded, cut_micro_batches
from pipar.nn.optimizers import sgd
from pipar.nn.snapshot import Snapshot
from pipar.tasks.task import classification
from pipar.tensors.bodies import read_state, state_body, weights_sha256
from pipar.wire.messages import Body
from pipar.wire.orders import TrainedPart

#: Names with dots, of which one is the start of the other: the layer "1.0" of a must not be taken for "0" of a.1.
SPLIT_POINTS = {"a": 1, "a.1": 1}
DIFFERENT_SPLIT_POINTS = {"a": 1, "a.1": 2}
OPTIMIZER = sgd(learning_rate=0.1, momentum=0.9)


@pytest.fixture(autouse=True)
def same_random_numbers(one_thread: None) -> Iterator[None]:  # noqa: ARG001
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        yield


def network(width: int = 6) -> nn.Sequential:
    rest = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.BatchNorm1d(width))
    return nn.Sequential(nn.Linear(4, width), rest, nn.Dropout(0.5), nn.Linear(width, 3)).double()


class World:
    """A learner and its devices' parts, which survive a restart of the server."""

    def __init__(self, split_points: dict[str, int], *, shared: bool = False, keep: bool = False) -> None:
        self.settings = LearnerSettings(OPTIMIZER, task=classification(3), shares_server_model=shared, keep_state=keep)
        self.split_points = split_points
        self.learner = self.new_learner()
        self.parts = {
            device: TorchDevicePart(copy.deepcopy(split_model(self.learner.model, p)[0]), OPTIMIZER, has_loss=False)
            for device, p in split_points.items()
        }

    def new_learner(self) -> TorchLearner:
        return TorchLearner(network(), self.split_points, self.settings)

    def train(self, rounds: range) -> str:
        """Train some rounds of two batches and return the hash of the global model."""
        for number in rounds:
            for device, part in self.parts.items():
                for batch in range(2):
                    self._train_batch(device, part, seed=100 * number + batch)
            returned = [
                TrainedPart(device, part.pack(), 5 + place) for place, (device, part) in enumerate(self.parts.items())
            ]
            self.learner.aggregate(returned)
            for device, part in self.parts.items():
                part.unpack_and_install(self.learner.pack(device), keep_state=self.settings.keep_state)
        return self.learner.sha256()

    def _train_batch(self, device: str, part: TorchDevicePart, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn((8, 4), dtype=torch.float64, generator=generator)
        (piece,) = cut_micro_batches(inputs, torch.randint(3, (8,), generator=generator), [8])
        replica = self.learner.replica(device)
        activation = part.forward(1, piece).detach().clone()
        part.backward(1, replica.backward(replica.forward(Decoded(activation, piece.targets, 8, 8))))
        replica.step()
        part.step()

    def after_a_break(self, body: Body) -> World:
        """The same devices with a restarted server."""
        again = copy.copy(self)
        again.parts = copy.deepcopy(self.parts)
        torch.manual_seed(12345)  # as in a new process, without the earlier random state
        again.learner = self.new_learner()
        again.learner.restore(body)
        return again


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True], ids=["reset", "keep"])
@pytest.mark.parametrize(
    ("split_points", "shared"),
    [(SPLIT_POINTS, False), (DIFFERENT_SPLIT_POINTS, False), (SPLIT_POINTS, True)],
    ids=["replicas", "different-cuts", "shared"],
)
def test_resumed_training_is_the_same_bit_for_bit(split_points: dict[str, int], shared: bool, keep: bool) -> None:
    world = World(split_points, shared=shared, keep=keep)
    world.train(range(2))
    body, parts = world.learner.snapshot(), copy.deepcopy(world.parts)
    without_a_break = world.train(range(2, 5))
    world.parts = parts
    assert world.after_a_break(body).train(range(2, 5)) == without_a_break


@pytest.mark.parametrize(
    ("missing", "keep", "shared"),
    [("optimizer", True, False), ("optimizer", False, True), ("random", False, False), ("model", False, False)],
)
def test_each_part_of_a_snapshot_matters(missing: str, keep: bool, shared: bool) -> None:
    world = World(SPLIT_POINTS, shared=shared, keep=keep)
    world.train(range(2))
    snapshot, parts = Snapshot.read(world.learner.snapshot()), copy.deepcopy(world.parts)
    without_a_break = world.train(range(2, 4))
    world.parts = parts
    other = Snapshot(network().state_dict(), torch.get_rng_state())
    poorer = replace(snapshot, **{missing: getattr(other, missing)})
    assert world.after_a_break(poorer.pack()).train(range(2, 4)) != without_a_break


def test_replicas_from_before_a_restore_are_discarded() -> None:
    world = World(SPLIT_POINTS, keep=True)
    world.train(range(1))
    body, before = world.learner.snapshot(), copy.deepcopy(world.learner.replica("a").state())
    world.train(range(1, 2))
    world.learner.restore(body)
    assert weights_sha256(world.learner.replica("a").state()) == weights_sha256(before)


def test_momentum_that_is_reset_is_not_in_a_snapshot() -> None:
    world = World(SPLIT_POINTS)
    world.train(range(1))
    assert Snapshot.read(world.learner.snapshot()).optimizer == {}


def test_a_snapshot_from_before_there_were_other_optimisers_still_resumes() -> None:
    """It had the momentum of each weight under "momentum.DEVICE/NAME"."""
    world = World(SPLIT_POINTS, keep=True)
    world.train(range(2))
    body, parts = world.learner.snapshot(), copy.deepcopy(world.parts)
    former = {_former_name(name): tensor for name, tensor in read_state(body).items()}
    assert any(name.startswith("momentum.a/") for name in former)
    without_a_break = world.train(range(2, 4))
    world.parts = parts
    assert world.after_a_break(state_body(former)).train(range(2, 4)) == without_a_break


def _former_name(name: str) -> str:
    kind, _, rest = name.partition(".")
    return f"momentum.{rest.removesuffix('/momentum_buffer')}" if kind == "optimizer" else name


def test_taking_a_snapshot_changes_nothing_and_draws_no_random_number() -> None:
    hashes = set()
    for snapshots in (0, 1):
        torch.manual_seed(3)
        world = World(SPLIT_POINTS, keep=True)
        for number in range(3):
            world.train(range(number, number + 1))
            for _ in range(snapshots):
                world.learner.snapshot()
        hashes.add(world.learner.sha256())
    assert len(hashes) == 1


def test_a_snapshot_does_not_change_while_training_continues() -> None:
    world = World(SPLIT_POINTS, keep=True)
    world.train(range(1))
    body = world.learner.snapshot()
    before = hashlib.sha256(body.contiguous()).hexdigest()
    world.train(range(1, 2))
    assert hashlib.sha256(body.contiguous()).hexdigest() == before


def test_a_snapshot_holds_the_state_of_the_aggregator() -> None:
    given = Snapshot({"w": torch.ones(2)}, torch.get_rng_state(), aggregator={"step": torch.tensor(3)})
    assert torch.equal(Snapshot.read(given.pack()).aggregator["step"], torch.tensor(3))


def test_momentum_of_devices_and_layers_that_are_gone_is_left_out() -> None:
    world = World({"a": 1, "b": 1}, keep=True)
    world.train(range(1))
    body = world.learner.snapshot()
    other = TorchLearner(network(), {"a": 2, "c": 1}, world.settings)
    other.restore(body)
    assert set(other.replica("a").optimizer_state()) == {"3.weight/momentum_buffer", "3.bias/momentum_buffer"}
    assert other.replica("c").optimizer_state() == {}
    assert other.sha256() == world.learner.sha256()


def test_a_snapshot_of_another_network_is_refused_and_changes_nothing() -> None:
    world = World(SPLIT_POINTS, keep=True)
    before, random = world.learner.sha256(), torch.get_rng_state()
    wide = {**world.learner.state(), "0.weight": torch.zeros(2, 2, dtype=torch.float64)}
    single = {**world.learner.state(), "0.weight": world.learner.state()["0.weight"].float()}
    more = {**world.learner.state(), "9.weight": torch.zeros(1)}
    fewer = {name: tensor for name, tensor in world.learner.state().items() if name != "0.weight"}
    for state, says in (
        (wide, r"its '0.weight' is \(2, 2\) in torch.float64, but here it is \(6, 4\)"),
        (single, r"in torch.float32, but here it is"),
        (more, "only one of them has '9.weight'"),
        (fewer, "only one of them has '0.weight'"),
    ):
        with pytest.raises(InputError, match=says):
            world.learner.restore(Snapshot(state, torch.get_rng_state()).pack())
    assert world.learner.sha256() == before
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("body", [Body.of(b"torn"), state_body({}), state_body({"random.torch": torch.ones(3)})])
def test_a_body_that_is_no_snapshot_is_refused_in_one_sentence(body: Body) -> None:
    with pytest.raises(InputError) as raised:
        World(SPLIT_POINTS).learner.restore(body)
    assert "\n" not in str(raised.value)


def test_a_snapshot_is_valid_safetensors_for_every_kind_of_tensor() -> None:
    weights = torch.arange(6.0)
    state = {
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(5),
        "empty": torch.zeros(0, 3),
        "float64": torch.randn(2, 3, dtype=torch.float64),
        "bfloat16": torch.randn(3).bfloat16(),
        "transposed": torch.randn(2, 3).t(),
        "tied": weights,
        "tied too": weights,
        "part": weights[2:4],
    }
    body = state_body(state)
    read = safetensors.torch.load(bytes(body.contiguous()))
    assert read.keys() == state.keys()
    for name, tensor in state.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name], tensor)
    assert body.size_bytes == body.contiguous().nbytes
