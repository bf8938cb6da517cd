"""Cuts that follow a ReLU are found for every network, and the gradient at a zero reaches no weight there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipar.cutting.split import split_model
from pipar.networks.blocks import NORMS, Residual
from pipar.networks.models import NETWORKS, build_model
from pipar.tensors.relu_outputs import is_rectified, rectified_cuts

pytestmark = pytest.mark.usefixtures("one_thread")

CIFAR = (3, 32, 32)
EXPECTED = {
    "vgg5": range(1, 5),  # all but the last linear layer
    "vgg16": range(1, 16),
    "resnet18": range(1, 9),  # the last block averages its map after the ReLU
    "resnet101": range(1, 34),
    "mobilenetv3_small": (),  # hard-swish, or a projection without an activation
    "mobilenetv3_large": (),
}


# The large networks consist of the same blocks as the small ones: one norm is enough for them.
CASES = [
    pytest.param(name, norm, marks=() if name == "vgg5" else pytest.mark.slow)
    for name in NETWORKS
    for norm in (NORMS if name in ("vgg5", "resnet18", "mobilenetv3_small") else ("group",))
]


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_rectified_cuts_of_each_network_are_those_after_a_relu_in_its_tables(name: str, norm: str) -> None:
    model = build_model(name, input_shape=CIFAR, classes=10, norm=norm)
    assert rectified_cuts(model, CIFAR) == set(EXPECTED[name])


def ends_in_relu(part: nn.Sequential, input_shape: tuple[int, ...]) -> bool:
    return len(part) in rectified_cuts(part, input_shape)


def test_a_part_ends_in_a_relu_exactly_if_the_network_has_that_cut() -> None:
    model = build_model("vgg5", input_shape=CIFAR, classes=10)
    parts = [split_model(model, split_point)[0] for split_point in range(1, 6)]
    assert [ends_in_relu(part, CIFAR) for part in parts] == [True, True, True, True, False]


# ---- a property: gradients of the weights do not depend on the gradient at zeros of the output ----


def gradients(part: nn.Module, inputs: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return the gradients of all weights and of the inputs for a gradient of the output."""
    inputs = inputs.clone().requires_grad_()
    torch.default_generator.manual_seed(3)  # for dropout
    output: Tensor = part(inputs.clone())
    wanted = [inputs, *(weight for weight in part.parameters() if weight.requires_grad)]
    return list(torch.autograd.grad(output, wanted, gradient, allow_unused=True))


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.int32)


def same_without_gradient_at_zeros(part: nn.Module, inputs: Tensor) -> bool:
    """Return True if no bit of any gradient changes when gradients at zeros of the output are not sent.

    Some of them are infinite or not a number: they are selected away, not multiplied by 0.
    """
    torch.default_generator.manual_seed(3)
    output: Tensor = part(inputs.clone())
    zeros = bits(output) == 0
    assert zeros.any(), "without a zero nothing is shown"
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    full = gradient.masked_fill(zeros & (gradient > 1), torch.inf).masked_fill(zeros & (gradient < -1), torch.nan)
    sent = gradient.masked_fill(zeros, 0.0)
    pairs = zip(gradients(part, inputs, full), gradients(part, inputs, sent), strict=True)
    return all(torch.equal(bits(one), bits(other)) for one, other in pairs)


@pytest.mark.parametrize(("name", "norm"), [case for case in CASES if EXPECTED[str(case.values[0])]])
def test_no_weight_before_a_rectified_cut_sees_the_gradient_at_a_zero(name: str, norm: str) -> None:
    model = build_model(name, input_shape=CIFAR, classes=10, norm=norm)
    inputs = torch.randn((2, *CIFAR), generator=torch.Generator().manual_seed(1))
    # One layer at a time: it passes on the same bits, so the layers before it have the same gradients.
    for place, layer in enumerate(model, start=1):
        if place in EXPECTED[name]:
            assert same_without_gradient_at_zeros(layer, inputs), f"after layer {place}"
        inputs = layer(inputs).detach()


@pytest.mark.slow
def test_a_whole_part_has_the_same_gradients_without_those_at_zeros() -> None:
    part, _ = split_model(build_model("resnet18", input_shape=CIFAR, classes=10), 3)
    assert same_without_gradient_at_zeros(part, torch.randn((2, *CIFAR), generator=torch.Generator().manual_seed(1)))


# ---- a user's own layers ----


class Written(nn.Module):
    """A user's layer: a function of a linear layer, whose weights may start at zero like branches of ResNets."""

    def __init__(self, function: object, *, zero: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.function = function
        weights = torch.randn((16, 16), generator=torch.Generator().manual_seed(4)) / 4
        self.linear.weight.data.copy_(torch.zeros_like(weights) if zero else weights)
        nn.init.constant_(self.linear.bias, 0.0 if zero else -1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))  # type: ignore[operator,no-any-return]


def overwritten(x: Tensor) -> Tensor:
    y = F.relu6(x)
    y += x
    return y


def overwritten_unseen(x: Tensor) -> Tensor:
    y = F.relu6(x)
    with torch.no_grad():
        y[:, ::2] = 0.0
    return y


def overwritten_data(x: Tensor) -> Tensor:
    y = F.relu6(x)
    y.data[:, ::2] = 0.0
    return y


def scaled_by_a_hook(x: Tensor) -> Tensor:
    y = F.relu(x)
    y.register_hook(lambda gradient: gradient / (1 + gradient.nan_to_num(1.0, 1.0, 1.0).norm()))
    return y.flatten(1)


def looks_at_its_data(x: Tensor) -> Tensor:
    return F.leaky_relu(x) if x.shape[0] > 2 or x.sum() > 1e9 else F.relu(x)


def depends_on_chance(x: Tensor) -> Tensor:
    return F.leaky_relu(x) if x.shape[0] > 2 or torch.rand(()).item() < 1e-9 else F.relu(x)


def picture(x: Tensor) -> Tensor:
    return x.view(-1, 1, 4, 4)


class Pretender(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return F.leaky_relu(input)


class Honest(nn.ReLU):
    pass


RECTIFIED = {
    "module": nn.ReLU(),
    "in place": nn.ReLU(inplace=True),
    "relu6": nn.ReLU6(),
    "relu6 in place": nn.ReLU6(inplace=True),
    "subclass": Honest(),
    "functional": F.relu,
    "torch.relu": torch.relu,
    "method": Tensor.relu,
    "method in place": Tensor.relu_,
    "flattened": nn.Sequential(nn.ReLU(), nn.Unflatten(1, (4, 4)), nn.Identity(), nn.Flatten()),
    "reshaped": lambda x: F.relu(x).view(x.size(0), 4, -1).transpose(1, 2).reshape(x.shape[0], -1).unsqueeze(1),
    "made contiguous": lambda x: picture(F.relu(x)).permute(0, 2, 3, 1).contiguous(),
    "pooled": lambda x: F.max_pool2d(picture(F.relu(x)), 2),
    "pooled with overlap and padding": lambda x: F.max_pool2d(picture(F.relu(x)), 3, stride=1, padding=1),
    "pooled twice": lambda x: F.max_pool2d(F.max_pool2d(picture(F.relu(x)), 2, 1), 2, 1),
    "adaptively pooled": lambda x: F.adaptive_max_pool2d(picture(F.relu(x)), 3),
    "pooled lines": lambda x: F.max_pool1d(F.relu(x).unsqueeze(1), 3, 2, 1),
    "pooled volumes": lambda x: F.max_pool3d(F.relu(x).view(-1, 1, 4, 2, 2), 2),
    "sum before": lambda x: torch.relu_(x.mul(2).add_(x)),
    "twice": nn.Sequential(*[nn.ReLU()] * 2),
}
# Each has a slope at its zeros, or zeros that are not a ReLU's.
OTHERS = {
    "hard-swish": F.hardswish,
    "gelu": F.gelu,
    "silu": F.silu,
    "leaky": F.leaky_relu,
    "pretender": Pretender(),
    "tanh": torch.tanh,
    "hardtanh": F.hardtanh,
    "clamp": lambda x: x.clamp(min=0),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "linear": lambda x: x,
    "norm": nn.GroupNorm(2, 16),
    "pooled without a relu": lambda x: F.max_pool2d(picture(x), 2),
    "sum after": lambda x: F.relu(x) + x,
    "residual block": Residual(nn.Sequential(nn.Linear(16, 16), nn.ReLU())),
    "overwritten": overwritten,
    "looks at its data": looks_at_its_data,
    "depends on chance": depends_on_chance,
}
# These have the zeros of a ReLU, and others of their own.
CHANGED_AFTER = {
    "dropout": nn.Sequential(nn.ReLU(), nn.Dropout()),
    "overwritten unseen": overwritten_unseen,
    "overwritten data": overwritten_data,
    "hook": scaled_by_a_hook,
}
SIXTEEN = torch.randn((6, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", RECTIFIED)
def test_relu_of_a_users_layer_is_found_and_its_gradients_stay_the_same(name: str, zero: bool) -> None:
    part = nn.Sequential(Written(RECTIFIED[name], zero=zero))
    assert ends_in_relu(part, (16,))
    assert is_rectified(part(SIXTEEN))
    assert same_without_gradient_at_zeros(part, SIXTEEN)


@pytest.mark.parametrize("name", OTHERS)
def test_slope_at_a_zero_is_not_mistaken_for_a_relu_and_its_gradients_would_change(name: str) -> None:
    part = nn.Sequential(Written(OTHERS[name], zero=True))
    assert not ends_in_relu(part, (16,))
    assert not same_without_gradient_at_zeros(part, SIXTEEN)


@pytest.mark.parametrize("name", CHANGED_AFTER)
def test_relu_followed_by_other_zeros_does_not_count_and_its_gradients_would_change(name: str) -> None:
    part = nn.Sequential(Written(CHANGED_AFTER[name], zero=False))
    assert not ends_in_relu(part, (16,))
    assert not same_without_gradient_at_zeros(part, SIXTEEN)


def test_average_that_underflows_to_zero_passes_its_gradient_to_a_weight() -> None:
    layer = Written(lambda x: F.avg_pool2d(picture(F.relu(x)), 2), zero=True)
    with torch.no_grad():
        layer.linear.bias[0] = 1e-45  # the smallest number above 0; a quarter of it is 0
    assert not ends_in_relu(nn.Sequential(layer), (16,))
    assert not same_without_gradient_at_zeros(layer, SIXTEEN)


def test_relu_of_an_earlier_layer_counts_until_a_layer_changes_values() -> None:
    pooled = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout())
    assert rectified_cuts(pooled, (1, 8, 8)) == {2, 3, 4}
    frozen = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).requires_grad_(False)
    assert rectified_cuts(frozen, (2,)) == {2}
    again = nn.ReLU()
    assert rectified_cuts(nn.Sequential(nn.Linear(2, 2), again, nn.Linear(2, 2), again), (2,)) == {2, 4}


class Several(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.relu(x), x


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError(x.shape)


@pytest.mark.parametrize("layer", [Several(), Failing(), nn.MaxPool2d(2, return_indices=True), nn.Linear(3, 3)])
def test_layer_that_fails_or_returns_several_tensors_ends_the_search(layer: nn.Module) -> None:
    assert rectified_cuts(nn.Sequential(nn.ReLU(), layer, nn.ReLU()), (1, 4, 4)) == {1}


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_layer_with_hooks_is_not_run_and_ends_the_search(register: str) -> None:
    seen: list[object] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.ReLU()), nn.ReLU())
    getattr(model[2][0], register)(lambda *given: seen.append(given))
    assert rectified_cuts(model, (2,)) == {2}
    assert not ends_in_relu(model, (2,))
    assert seen == []
    output: Tensor = model[:2](torch.ones(1, 2))
    assert is_rectified(output)
    output.register_hook(lambda gradient: gradient)
    assert not is_rectified(output)


class Keeping(nn.Module):
    """A user's layer that stores its inputs, counts calls, and is a ReLU only in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.seen: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        self.calls += 1
        x = self.norm(x)
        return F.relu(x) if self.training else x


def test_search_changes_neither_the_model_nor_its_mode_nor_the_random_state() -> None:
    layer = Keeping().eval()
    model = nn.Sequential(nn.Linear(2, 2), layer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    numbers = torch.get_rng_state()
    with torch.no_grad():
        assert ends_in_relu(model, (2,))
        assert not torch.is_grad_enabled()
    assert (layer.seen, layer.calls, layer.training) == ([], 0, False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(weight.device.type == "cpu" and weight.grad is None for weight in model.parameters())
    assert torch.equal(torch.get_rng_state(), numbers)
