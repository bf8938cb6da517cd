"""The server's mathematics: replicas, aggregation over different split points, evaluation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipar.aggregation.averaging import federated_average
from pipar.cutting.split import split_model
from pipar.errors import ProtocolError
from pipar.nn.device_part import DeviceSettings, TorchDevicePart
from pipar.nn.learner import LearnerSettings, TorchLearner
from pipar.nn.optimizers import sgd
from pipar.nn.parts import Part
from pipar.tasks.evaluation import Evaluator
from pipar.tasks.task import classification
from pipar.tensors.bodies import read_state, state_body, weights_sha256
from pipar.wire.messages import EMPTY, Body
from pipar.wire.orders import TrainedPart

LAYERS = 3


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


def learner(
    split_points: dict[str, int], *, shared: bool = False, keep_state: bool = False, proximal: float = 0.0
) -> TorchLearner:
    settings = LearnerSettings(
        sgd(learning_rate=0.1, momentum=0.9),
        task=classification(3),
        shares_server_model=shared,
        keep_state=keep_state,
        proximal=proximal,
    )
    return TorchLearner(network(), split_points, settings)


def changed(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Another state with the same names: other weights, larger counters."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        if tensor.is_floating_point()
        else tensor + seed
        for name, tensor in state.items()
    }


def bring_back(
    one: TorchLearner, name: str, split_point: int, seed: int, samples: int
) -> tuple[TrainedPart, dict[str, torch.Tensor]]:
    """Simulate training of a device's whole model: its part is returned, the rest is in its replica."""
    whole = changed(network().state_dict(), seed)
    near, far = split_model(network(), split_point)
    one.replica(name).module.load_state_dict({key: whole[key] for key in far.state_dict()})
    return TrainedPart(name, state_body({key: whole[key] for key in near.state_dict()}), samples), whole


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return weights_sha256(one) == weights_sha256(other)


def test_models_that_were_cut_in_different_places_average_as_whole_models() -> None:
    split_points = {"a": 1, "b": 2, "c": LAYERS}
    one = learner(split_points)
    brought = [
        bring_back(one, name, p, seed, 10 * seed) for seed, (name, p) in enumerate(split_points.items(), start=1)
    ]
    one.aggregate([back for back, _ in reversed(brought)])
    wanted = federated_average([(whole, 10 * seed) for seed, (_, whole) in enumerate(brought, start=1)])
    assert same(one.state(), wanted)
    assert one.state()["1.num_batches_tracked"].item() == 3


def test_every_replica_and_every_device_gets_its_part_of_the_new_model() -> None:
    split_points = {"a": 1, "b": 2, "c": LAYERS}
    one = learner(split_points)
    one.pack("a")  # packed earlier, so that a stale copy would be noticed
    one.aggregate([bring_back(one, name, p, 5, 1)[0] for name, p in split_points.items()])
    for name in split_points:
        whole = {**read_state(one.pack(name)), **one.replica(name).state()}
        assert same(whole, one.state())


def test_the_order_of_arrival_does_not_change_a_bit() -> None:
    names = [f"pi-{n}" for n in range(5)]
    hashes = set()
    for order in (names, names[::-1], names[2:] + names[:2]):
        one = learner(dict.fromkeys(names, 2))
        backs = {name: bring_back(one, name, 2, seed, 7 * seed)[0] for seed, name in enumerate(names, start=1)}
        one.aggregate([backs[name] for name in order])
        hashes.add(one.sha256())
    assert len(hashes) == 1


def test_one_model_is_its_own_average_to_the_bit() -> None:
    for samples in (1, 3, 7, 49, 1000):
        one = learner({"a": 1})
        back, whole = bring_back(one, "a", 1, 3, samples)
        one.aggregate([back])
        assert same(one.state(), whole)


def test_devices_share_one_server_side_model_where_the_method_says_so() -> None:
    one = learner({"a": 1, "b": 1}, shared=True)
    assert one.replica("a") is one.replica("b")
    (back_a, whole_a), (back_b, whole_b) = (
        bring_back(one, name, 1, seed, 1) for seed, name in enumerate("ab", start=1)
    )
    one.aggregate([back_a, back_b])
    wanted = federated_average([(whole_a, 1), (whole_b, 1)])
    assert torch.equal(one.state()["0.weight"], wanted["0.weight"])
    assert torch.equal(one.state()["2.weight"], whole_b["2.weight"])  # the latest shared model


def test_without_sharing_each_device_has_its_own_replica() -> None:
    one = learner({"a": 1, "b": 1})
    assert one.replica("a") is one.replica("a")
    assert one.replica("a") is not one.replica("b")
    with torch.no_grad():
        one.replica("a").module[-1].weight.zero_()
    assert one.replica("b").state()["2.weight"].abs().sum() > 0
    assert one.state()["2.weight"].abs().sum() > 0


def test_the_progress_of_a_lost_device_is_discarded() -> None:
    one = learner({"a": 1, "b": 1}, keep_state=True)
    step_with(one.replica("a"), 1.0)
    step_with(one.replica("b"), 1.0)
    of_b = copy.deepcopy(one.replica("b").state())
    one.discard_progress("a")
    assert same({**read_state(one.pack("a")), **one.replica("a").state()}, one.state())
    assert same(one.replica("b").state(), of_b)
    before = copy.deepcopy(one.replica("a").state())
    step_with(one.replica("a"), 0.0)
    assert same(one.replica("a").state(), before)  # its momentum too


def test_a_shared_model_keeps_completed_batches_of_a_lost_device_but_no_unfinished_one() -> None:
    one = learner({"a": 1, "b": 1}, shared=True)
    step_with(one.replica("a"), 1.0)
    after_a_batch = copy.deepcopy(one.replica("b").state())
    for parameter in one.replica("a").module.parameters():
        parameter.grad = torch.ones_like(parameter)
    one.discard_progress("a")
    assert same(one.replica("b").state(), after_a_batch)
    assert all(parameter.grad is None for parameter in one.replica("b").module.parameters())


def test_a_shared_model_rewinds_to_the_last_aggregation() -> None:
    one, untouched = (learner({"a": 1, "b": 1}, shared=True) for _ in range(2))
    for each in (one, untouched):
        step_with(each.replica("a"), 1.0)
        each.aggregate([TrainedPart("a", each.pack("a"), 1)])
    step_with(one.replica("b"), 3.0)
    one.replica("b").module(torch.ones(4, 5, dtype=torch.float64))  # running statistics
    one.rewind_shared_model()
    assert same(one.replica("b").state(), untouched.replica("b").state())
    for each in (one, untouched):
        step_with(each.replica("b"), 0.0)  # only momentum moves the weights
    assert same(one.replica("b").state(), untouched.replica("b").state())


def test_a_shared_model_resumed_from_a_checkpoint_rewinds_to_it() -> None:
    before, one = (learner({"a": 1}, shared=True) for _ in range(2))
    step_with(before.replica("a"), 1.0)
    before.aggregate([TrainedPart("a", before.pack("a"), 1)])
    one.restore(before.snapshot())
    step_with(one.replica("a"), 3.0)
    one.rewind_shared_model()
    assert same(one.replica("a").optimizer_state(), before.replica("a").optimizer_state())
    assert same(one.replica("a").state(), before.replica("a").state())


def test_a_restore_point_restores_the_global_model_after_any_aggregation() -> None:
    one, untouched = (learner({"a": 1, "b": 1}, shared=True) for _ in range(2))
    put_back = one.restore_point()
    for seed, device in enumerate(("a", "b")):
        one.aggregate([bring_back(one, device, 1, seed, 1)[0]])
    assert not same(one.state(), untouched.state())
    put_back()
    assert same(one.state(), untouched.state())


def test_a_device_whose_progress_was_discarded_takes_no_momentum_to_another_cut() -> None:
    one = learner({"a": 1, "b": 1}, keep_state=True)
    step_with(one.replica("a"), 1.0)
    one.discard_progress("a")
    leaving = one.move_cuts({"a": 2, "b": 2})
    assert {name: read_state(body) for name, body in leaving.items()} == {"a": {}, "b": {}}
    one.replica("a").receive_state(state_body({}))  # the answer of a device that has discarded its own


def test_another_device_may_join_a_shared_model_at_the_same_cut() -> None:
    one = learner({"a": 1}, shared=True)
    replica = one.replica("a")
    one.move_cuts({"b": 1})
    assert one.replica("b") is replica
    with pytest.raises(AssertionError):
        one.move_cuts({"b": 2})


@pytest.mark.parametrize("keep", [True, False])
def test_a_replicas_momentum_is_kept_or_reset_at_the_aggregation(keep: bool) -> None:
    one = learner({"a": 1}, keep_state=keep)
    replica = one.replica("a")
    for parameter in replica.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    replica.step()
    one.aggregate([TrainedPart("a", one.pack("a"), 1)])
    before = copy.deepcopy(replica.state())
    for parameter in replica.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    replica.step()  # without a gradient, only momentum moves a weight
    assert same(replica.state(), before) is not keep


@pytest.mark.parametrize("shared", [False, True])
def test_a_replica_is_pulled_towards_the_global_model_of_its_round(shared: bool) -> None:
    one = learner({"a": 1, "b": 1}, shared=shared, proximal=0.5)

    def pull() -> torch.Tensor:
        """Return the gradient of a step without a loss, for a weight that differs from the global one by 2."""
        replica = one.replica("a")
        weight = replica.module[-1].weight
        with torch.no_grad():
            weight.copy_(one.state()["2.weight"] + 2)
        before = weight.detach().clone()
        weight.grad = torch.zeros_like(weight)
        replica._steps = sgd(learning_rate=1.0, momentum=0.0).over(replica.module)
        replica.step()
        return before - weight.detach()

    assert torch.allclose(pull(), torch.ones(3, 5, dtype=torch.float64))  # mu times 2
    one.aggregate([bring_back(one, name, 1, seed, 1)[0] for seed, name in enumerate("ab", start=1)])
    assert torch.allclose(pull(), torch.ones(3, 5, dtype=torch.float64))
    if not shared:
        one.move_cuts({"a": 2})
        assert torch.allclose(pull(), torch.ones(3, 5, dtype=torch.float64))


def step_with(part: Part, value: float) -> None:
    """Take one step with the same gradient everywhere."""
    for parameter in part.module.parameters():
        parameter.grad = torch.full_like(parameter, value)
    part.step()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (1, LAYERS), (LAYERS, 1), (2, LAYERS)])
def test_a_replica_at_a_new_cut_starts_from_the_global_model(before: int, after: int) -> None:
    one = learner({"a": before, "b": 1})
    one.aggregate([bring_back(one, name, p, 5, 1)[0] for name, p in (("a", before), ("b", 1))])
    other = one.replica("b")
    assert one.move_cuts({"a": after}) == {}
    assert same({**read_state(one.pack("a")), **one.replica("a").state()}, one.state())
    assert set(read_state(one.pack("a"))) == set(split_model(network(), after)[0].state_dict())
    assert one.replica("b") is other
    one.aggregate([bring_back(one, name, p, 6, 1)[0] for name, p in (("a", after), ("b", 1))])
    assert same(one.state(), changed(network().state_dict(), 6))


def test_momentum_moves_with_its_layer() -> None:
    one = learner({"a": 1}, keep_state=True)
    step_with(one.replica("a"), 1.0)
    leaving = read_state(one.move_cuts({"a": 2})["a"])
    assert {name: set(momentum.flatten().tolist()) for name, momentum in leaving.items()} == {
        "1.weight/momentum_buffer": {1.0},
        "1.bias/momentum_buffer": {1.0},
    }
    before = copy.deepcopy(one.replica("a").state())
    step_with(one.replica("a"), 0.0)
    assert torch.allclose(one.replica("a").state()["2.bias"], before["2.bias"] - 0.1 * 0.9)
    assert read_state(one.move_cuts({"a": 1})["a"]) == {}
    one.replica("a").receive_state(state_body({"1.bias/momentum_buffer": torch.full((5,), 2.0, dtype=torch.float64)}))
    before = copy.deepcopy(one.replica("a").state())
    step_with(one.replica("a"), 0.0)
    assert torch.allclose(one.replica("a").state()["1.bias"], before["1.bias"] - 0.1 * 0.9 * 2.0)
    assert torch.equal(one.replica("a").state()["1.weight"], before["1.weight"])  # had none


@pytest.mark.parametrize(
    "state",
    [
        {"0.bias/momentum_buffer": torch.zeros(5, dtype=torch.float64)},
        {"2.bias/momentum_buffer": torch.zeros(3, dtype=torch.float64)},
        {"1.bias/momentum_buffer": torch.zeros(6, dtype=torch.float64)},
        {"1.bias/momentum_buffer": torch.zeros(5, dtype=torch.float32)},
        {"1.running_mean/momentum_buffer": torch.zeros(5, dtype=torch.float64)},
        {"1.bias/exp_avg": torch.zeros(5, dtype=torch.float64)},
        {"1.bias": torch.zeros(5, dtype=torch.float64)},
    ],
    ids=["not here", "did not move", "shape", "dtype", "no weight", "another optimiser", "no key"],
)
def test_momentum_that_does_not_fit_the_layers_that_moved_is_refused(state: dict[str, torch.Tensor]) -> None:
    one = learner({"a": 2}, keep_state=True)
    one.replica("a")
    one.move_cuts({"a": 1})
    with pytest.raises(ProtocolError, match="does not fit the layers that moved"):
        one.replica("a").receive_state(state_body(state))
    with pytest.raises(ProtocolError, match="not valid safetensors"):
        one.replica("a").receive_state(Body.of(b"not a model"))


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "missing", "bytes"])
def test_a_model_that_does_not_match_the_devices_part_is_refused_with_its_name(change: str) -> None:
    one = learner({"a": 1, "b": 1})
    back, _ = bring_back(one, "a", 1, 1, 1)
    state = read_state(back.body)
    if change == "name":
        state["2.weight"] = state.pop("0.weight")
    elif change == "shape":
        state["0.bias"] = torch.zeros(6, dtype=torch.float64)
    elif change == "dtype":
        state["0.bias"] = state["0.bias"].float()
    else:
        del state["0.bias"]
    body = Body.of(b"not a model") if change == "bytes" else state_body(state)
    before = one.sha256()
    with pytest.raises(ProtocolError, match=r"^a returned"):
        one.aggregate([TrainedPart("a", body, 1), bring_back(one, "b", 1, 2, 1)[0]])
    assert one.sha256() == before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_is_not_finite_is_refused_with_its_device_and_not_averaged(value: float) -> None:
    one = learner({"a": 1, "b": 1})
    state = read_state(bring_back(one, "a", 1, 1, 1)[0].body)
    state["0.bias"][0] = value
    before = one.sha256()
    with pytest.raises(ProtocolError, match=r"^The model that a returned has values that are infinite or not a"):
        one.aggregate([TrainedPart("a", state_body(state), 1), bring_back(one, "b", 1, 2, 1)[0]])
    assert one.sha256() == before


def test_momentum_that_is_not_finite_is_refused() -> None:
    one = learner({"a": 2}, keep_state=True)
    one.replica("a")
    one.move_cuts({"a": 1})
    new = one.replica("a")._new
    moved = {f"{name}/momentum_buffer": torch.full_like(value, float("nan")) for name, value in new.items()}
    with pytest.raises(ProtocolError, match=r"optimiser state .* has values that are infinite"):
        one.replica("a").receive_state(state_body(moved))


def test_devices_with_one_split_point_share_the_packed_bytes() -> None:
    one = learner({"a": 1, "b": 1, "c": 2})
    assert one.pack("a") is one.pack("b")
    assert one.pack("a") is not one.pack("c")


def test_sizes_are_those_of_the_tensors() -> None:
    one = learner({"a": 1})
    # 4 x 5 weights and 5 biases; 5 scales, shifts, means and variances, one counter; 5 x 3 weights and 3 biases.
    assert one.part_bytes("a") == 25 * 8
    assert one.model_bytes() == (25 + 20 + 1 + 18) * 8


def test_the_evaluator_keeps_the_model_it_was_made_for_and_does_not_change_the_global_one() -> None:
    one = learner({"a": 1})
    inputs = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    before, evaluate = one.sha256(), one.evaluator()
    evaluate(lambda: (inputs, labels))
    first = evaluate.scores()
    assert one.sha256() == before
    one.aggregate([bring_back(one, "a", 1, 3, 1)[0]])
    assert one.sha256() != before
    evaluate(lambda: (inputs, labels))
    assert evaluate.scores() == first
    other = one.evaluator()
    other(lambda: (inputs, labels))
    assert other.scores() != first


@pytest.mark.parametrize("shared", [False, True])
def test_packed_and_saved_models_do_not_change_later(shared: bool) -> None:
    """Nothing is copied: the global model gets new tensors, and those returned earlier do not change."""
    one = learner({"a": 1, "b": 1}, shared=shared)
    given = [one.pack("a"), one.packed_state(), one.snapshot()]
    before = [bytes(body.contiguous()) for body in given]
    one.replica("a")
    step_with(one.replica("b"), 1.0)
    one.aggregate([bring_back(one, name, 1, seed, 1)[0] for seed, name in enumerate("ab", start=1)])
    assert [bytes(body.contiguous()) for body in given] == before
    assert bytes(one.packed_state().contiguous()) != before[1]


def test_weights_that_two_layers_share_are_shared_after_an_aggregation() -> None:
    model = network()
    model[2] = nn.Linear(5, 4).double()
    model.append(nn.Linear(4, 5).double())
    model[3].weight = model[0].weight
    one = TorchLearner(model, {"a": 4}, LearnerSettings(sgd(), task=classification(3)))
    one.aggregate([TrainedPart("a", state_body(changed(model.state_dict(), 1)), 1)])
    assert one.model[3].weight is one.model[0].weight


def test_batches_are_evaluated_to_their_mean_loss_and_the_share_of_correct_predictions() -> None:
    evaluate = Evaluator(nn.Identity(), classification(2))
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    labels = torch.tensor([0, 1, 1])
    evaluate(lambda: (logits[:2], labels[:2]))
    evaluate(lambda: (logits[2:], labels[2:]))
    assert evaluate.scores().loss == pytest.approx(F.cross_entropy(logits, labels).item())
    assert evaluate.scores().accuracy == 2 / 3


def test_the_packed_state_is_a_safetensors_file_of_the_global_model() -> None:
    one = learner({"a": 1})
    assert same(read_state(one.packed_state()), one.state())


def test_changes_restore_every_bit_and_the_previous_model_is_kept_only_for_them() -> None:
    one = learner({"a": 2})
    part = TorchDevicePart(
        split_model(network(), 2)[0], sgd(), has_loss=False, settings=DeviceSettings(keeps_base=True)
    )
    part.unpack_and_install(one.pack("a"), keep_state=False)
    with torch.no_grad():
        for weight in part.module.parameters():
            weight += 1e-6 * torch.randn(weight.shape, dtype=weight.dtype)
    assert part.pack().encoding == "safetensors"
    back = part.pack(changes=True)
    assert back.encoding == "changes"
    assert back.size_bytes < part.pack().size_bytes

    one.aggregate([TrainedPart("a", EMPTY, 1, one.decode("a", back))], keep_before=True)
    assert same(split_model(one.model, 2)[0].state_dict(), part.state())
    changes = one.pack("a", changes=True)
    assert changes.encoding == "changes"
    part.unpack_and_install(changes, keep_state=False)
    assert same(split_model(one.model, 2)[0].state_dict(), part.state())

    one.aggregate([TrainedPart("a", part.pack(), 1)])
    assert one.pack("a", changes=True).encoding == "safetensors"  # no previous model is left to compare with


# --- residuals of lossy encodings


def sent_gradients(one: TorchLearner, encoding: str, *order: str) -> dict[str, list[bytes]]:
    """Return the bytes of the gradients sent to each device, in this order."""
    sent: dict[str, list[bytes]] = {device: [] for device in order}
    for device in order:
        number = len(sent[device]) + 1
        activation = torch.zeros(1, 64, dtype=torch.float64)
        activation.grad = torch.linspace(0, 1 if device == "a" else -1, 64, dtype=torch.float64)[None] * number
        body = one.replica(device).encode(activation, encoding, (1, number, 1, device))
        assert body.chunks is not None
        sent[device].append(b"".join(body.chunks.ready[0].buffers))
    return sent


@pytest.mark.parametrize("encoding", ["int8", "topk"])
def test_devices_that_share_a_model_get_only_their_own_residuals(encoding: str) -> None:
    alone, together = (learner({"a": 1, "b": 1}, shared=True) for _ in range(2))
    own = sent_gradients(alone, encoding, "a", "a", "a")
    assert sent_gradients(together, encoding, "a", "b", "a", "b", "a")["a"] == own["a"]
    lost = together.replica("a").take_encoding_error()
    assert lost is not None
    assert lost[0] > 0
    assert together.replica("b").take_encoding_error() == (0.0, 0.0)  # one replica: the error was already taken


def test_a_shared_model_drops_the_residuals_of_devices_that_are_gone() -> None:
    one, again = (learner({"a": 1, "b": 1}, shared=True) for _ in range(2))
    sent_gradients(one, "topk", "a", "b")
    one.keep_replicas_of({"b"})
    assert sent_gradients(one, "topk", "a") == sent_gradients(again, "topk", "a")
