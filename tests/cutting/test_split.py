"""A cut network computes the same as the uncut one, bit for bit, under the same names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipar.cutting.split import join_states, layer_count, part_of_state, split_model
from pipar.errors import PlanError
from pipar.networks.blocks import NORMS
from pipar.networks.models import NETWORKS, build_model

InputShape = tuple[int, int, int]

CLASSES = 10
INPUTS: dict[str, tuple[InputShape, ...]] = {
    "vgg5": ((1, 28, 28), (1, 32, 32), (3, 32, 32)),
    "resnet18": ((1, 28, 28), (1, 32, 32), (3, 32, 32)),
    "mobilenetv3_small": ((1, 28, 28), (1, 32, 32), (3, 32, 32)),
    "vgg16": ((3, 32, 32), (3, 64, 64)),
    "resnet101": ((3, 32, 32), (3, 64, 64)),
    "mobilenetv3_large": ((3, 32, 32), (3, 64, 64)),
}
SMALL = ("vgg5", "resnet18", "mobilenetv3_small")
DTYPES = (torch.float32, torch.float64)


pytestmark = pytest.mark.usefixtures("one_thread")


def case(name: str, *values: object, slow: bool) -> object:
    """Return a case of a parametrized test, marked slow if it is slow or of a large network."""
    return pytest.param(name, *values, marks=pytest.mark.slow if slow or name not in SMALL else ())


def awake_model(name: str, input_shape: InputShape, norm: str, dtype: torch.dtype) -> nn.Sequential:
    """Return the network with active residual branches: some start at zero, and so would their gradients."""
    model = build_model(name, input_shape=input_shape, classes=CLASSES, norm=norm, dtype=dtype)
    for weight in model.parameters():
        if not weight.any():
            weight.data.fill_(0.01)
    return model


def one_batch(input_shape: InputShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn((2, *input_shape), generator=random, dtype=torch.float32).to(dtype)
    return inputs, torch.randint(CLASSES, (2,), generator=random)


def train_in_parts(parts: list[nn.Sequential], inputs: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits and all gradients by name; only values pass between the parts, as over a link."""
    sent: list[Tensor] = []
    received = [inputs]
    for part in parts:
        sent.append(part(received[-1]))
        received.append(sent[-1].detach().requires_grad_())
    logits = received[-1]
    torch.autograd.backward(cross_entropy(logits, labels))
    for output, copy in zip(reversed(sent), reversed(received), strict=False):
        if output.requires_grad:  # an empty part returns its input
            torch.autograd.backward(output, copy.grad)
    return logits.detach(), take_gradients(parts)


def take_gradients(parts: list[nn.Sequential]) -> dict[str, Tensor]:
    """Return every gradient by name, and clear them."""
    gradients = {}
    for name, parameter in (item for part in parts for item in part.named_parameters()):
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad
        parameter.grad = None
    return gradients


def assert_same_bits(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.equal(one[0], other[0])
    assert list(one[1]) == list(other[1])
    assert all(gradient.isfinite().all() for gradient in one[1].values())
    assert sum(bool(gradient.any()) for gradient in one[1].values()) > 0.9 * len(one[1])
    assert [name for name in one[1] if not torch.equal(one[1][name], other[1][name])] == []


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", [case(name, slow=name == "resnet18") for name in NETWORKS])
@pytest.mark.slow
def test_cut_at_any_split_point_gives_the_logits_and_gradients_of_the_uncut_network(name: str, norm: str) -> None:
    input_shape = INPUTS[name][0]
    model = awake_model(name, input_shape, norm, torch.float32)
    inputs, labels = one_batch(input_shape, torch.float32)
    uncut = train_in_parts([model], inputs, labels)
    for split_point in split_points(name, layer_count(model)):
        parts = list(split_model(model, split_point))
        assert_same_bits(train_in_parts(parts, inputs, labels), uncut)


def split_points(name: str, layers: int) -> list[int]:
    """Return all split points of a small network, and some of a large one: the next test cuts it at all of them."""
    return list(range(1, layers + 1)) if name in SMALL else [1, layers // 2, layers - 1, layers]


def all_at_once() -> Iterator[object]:
    """Yield all cases of small networks; of large ones each norm, and another dtype and image size once each."""
    for name, shapes in INPUTS.items():
        if name in SMALL:
            for shape, dtype, norm in itertools.product(shapes, DTYPES, NORMS):
                yield case(name, shape, dtype, norm, slow=name != "vgg5")
        else:
            yield from (case(name, shapes[0], torch.float32, norm, slow=True) for norm in NORMS)
            yield case(name, shapes[0], torch.float64, "batch", slow=True)
            yield case(name, shapes[1], torch.float32, "group", slow=True)


@pytest.mark.parametrize(("name", "input_shape", "dtype", "norm"), list(all_at_once()))
def test_cut_after_every_layer_gives_the_logits_and_gradients_of_the_uncut_network(
    name: str, input_shape: InputShape, dtype: torch.dtype, norm: str
) -> None:
    model = awake_model(name, input_shape, norm, dtype)
    inputs, labels = one_batch(input_shape, dtype)
    assert_same_bits(train_in_parts(single_layers(model), inputs, labels), train_in_parts([model], inputs, labels))


def single_layers(model: nn.Sequential) -> list[nn.Sequential]:
    """Return the network cut after its first layer, the rest after its first layer, and so on."""
    parts, rest = [], model
    while len(rest) > 0:
        layer, rest = split_model(rest, 1)
        parts.append(layer)
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_names_do_not_depend_on_the_split_point_and_nothing_is_copied(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name, input_shape=(3, 32, 32), classes=CLASSES, norm="batch")
    parameters = list(model.named_parameters())
    for split_point in range(1, NETWORKS[name].layers + 1):
        device_part, server_part = split_model(model, split_point)
        assert (len(device_part), len(server_part)) == (split_point, NETWORKS[name].layers - split_point)
        both = [*device_part.named_parameters(), *server_part.named_parameters()]
        assert [(name, id(weight)) for name, weight in both] == [(name, id(weight)) for name, weight in parameters]
        assert list(join_states(device_part.state_dict(), server_part.state_dict())) == list(model.state_dict())


def test_unnamed_layers_keep_their_numbers_after_the_cut() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))
    _, server_part = split_model(model, 2)
    assert list(server_part.state_dict()) == ["2.weight", "2.bias"]


def test_layer_that_occurs_twice_on_one_side_runs_twice() -> None:
    twice = nn.Linear(2, 2)
    model = nn.Sequential(twice, twice, nn.Linear(2, 3))
    device_part, server_part = split_model(model, 2)
    inputs = torch.ones(1, 2)
    assert torch.equal(server_part(device_part(inputs)), model(inputs))
    assert layer_count(model) == 3
    assert len(device_part) == 2


def test_layer_on_both_sides_of_the_cut_is_refused() -> None:
    twice = nn.Linear(2, 2)
    model = nn.Sequential(twice, nn.Linear(2, 2), nn.Sequential(nn.ReLU(), twice))
    with pytest.raises(PlanError, match=r"'2\.1' also occurs before the cut after layer 1, .*another split point"):
        split_model(model, 1)
    assert len(split_model(model, 3)[0]) == 3


def test_weight_on_both_sides_of_the_cut_is_refused() -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    with pytest.raises(PlanError, match=r"'1\.weight' also occurs"):
        split_model(nn.Sequential(first, last), 1)


@pytest.mark.parametrize("split_point", [-1, 0, 4])
def test_split_point_outside_the_network_is_refused(split_point: int) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))
    with pytest.raises(PlanError) as caught:
        split_model(model, split_point)
    assert str(caught.value) == (
        f"split point {split_point} is outside 1..3: the model has 3 layers. "
        "For plain federated learning use --method fl."
    )


def test_parts_keep_the_mode_of_the_model_and_of_each_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 4))
    model[1].eval()
    split_model(model, 2)
    assert [module.training for module in model.modules()] == [True, True, False, True]
    model.eval()
    assert not any(module.training for part in split_model(model, 2) for module in part.modules())


def test_part_of_a_state_loads_into_the_part_and_joins_to_the_whole() -> None:
    model, other = (build_model("vgg5", input_shape=(1, 28, 28), classes=10, norm="batch", seed=s) for s in (0, 1))
    state = model.state_dict()
    parts = split_model(other, 2)
    for part in parts:
        part.load_state_dict(part_of_state(state, part))
    joined = join_states(parts[0].state_dict(), parts[1].state_dict())
    assert list(joined) == list(state)
    assert all(torch.equal(joined[name], state[name]) for name in state)


def test_states_that_overlap_are_not_joined() -> None:
    model = build_model("vgg5", input_shape=(1, 28, 28), classes=10)
    device_part, _ = split_model(model, 3)
    _, server_part = split_model(model, 2)
    with pytest.raises(PlanError, match=r"both parts hold 'conv3\.conv\.bias', one of 4 common names"):
        join_states(device_part.state_dict(), server_part.state_dict())


def test_part_of_another_models_state_is_refused() -> None:
    plain, normed = (build_model("vgg5", input_shape=(1, 28, 28), classes=10, norm=n) for n in ("none", "group"))
    with pytest.raises(PlanError, match=r"the state has no 'conv1\.norm\.weight', one of 2 missing names"):
        part_of_state(plain.state_dict(), split_model(normed, 1)[0])
