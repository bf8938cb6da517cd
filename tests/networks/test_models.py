"""The six networks: their layers, sizes, initial weights, and refused arguments."""

from __future__ import annotations

import math
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipar.errors import ConfigError, ModelError
from pipar.networks.blocks import NORMS, group_count
from pipar.networks.models import (
    NETWORKS,
    build_model,
    check_fits,
    check_module,
    check_step,
    is_sequential,
    uses_batch_statistics,
    uses_dropout,
)
from pipar.tasks.task import classification
from pipar.tensors.inputs import InputForm, TensorForm
from pipar.user_function import load_factory

SMALL = ("vgg5", "resnet18", "mobilenetv3_small")
CIFAR = (3, 32, 32)
MNIST = (1, 28, 28)


pytestmark = pytest.mark.usefixtures("one_thread")


def on_meta(
    name: str, input_shape: tuple[int, int, int] = CIFAR, classes: int = 10, norm: str = "group"
) -> nn.Sequential:
    """Return the network on the meta device, enough for shapes and counts."""
    return built_on_meta(name, input_shape, classes, norm)


@cache
def built_on_meta(name: str, input_shape: tuple[int, int, int], classes: int, norm: str) -> nn.Sequential:
    with torch.device("meta"):
        return build_model(name, input_shape=input_shape, classes=classes, norm=norm)


def large(*case: object) -> ParameterSet:
    """Return a case of a network with many layers, which take a tenth of a second each time."""
    return pytest.param(*case, marks=pytest.mark.slow)


def by_size(*names: str) -> list[object]:
    return [name if name in SMALL else large(name) for name in names]


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def shape_after(model: nn.Sequential, layers: int, input_shape: tuple[int, int, int]) -> tuple[int, ...]:
    """Return the shape of one sample after this number of layers."""
    output: Tensor = model[:layers](torch.empty((2, *input_shape), device="meta"))
    return tuple(output.shape[1:])


def weights(model: nn.Module) -> list[Tensor]:
    return list(model.state_dict().values())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("vgg5", 5),
        ("resnet18", 10),
        ("mobilenetv3_small", 15),
        large("vgg16", 16),
        large("resnet101", 35),
        large("mobilenetv3_large", 19),
    ],
)
def test_network_has_the_papers_number_of_layers(name: str, layers: int, norm: str) -> None:
    assert len(on_meta(name, norm=norm)) == NETWORKS[name].layers == layers


@pytest.mark.parametrize("name", by_size(*NETWORKS))
def test_layer_names_end_in_their_place_and_have_no_dots(name: str) -> None:
    for place, child in enumerate(on_meta(name)._modules, start=1):
        assert child.rstrip("0123456789") in {"conv", "block", "fc"}
        assert child.removeprefix(child.rstrip("0123456789")) == str(place)


@pytest.mark.parametrize(
    ("name", "norm", "count"),
    [
        ("resnet18", "batch", 11_689_512),
        large("resnet101", "batch", 44_549_160),
        ("mobilenetv3_small", "batch", 2_542_856),
        large("mobilenetv3_large", "batch", 5_483_032),
        ("vgg16", "none", 138_357_544),
        ("vgg16", "batch", 138_365_992),
    ],
)
def test_parameter_count_is_the_published_one_for_imagenet(name: str, norm: str, count: int) -> None:
    assert parameter_count(on_meta(name, (3, 224, 224), 1000, norm)) == count


def test_vgg5_parameter_count_is_the_one_counted_by_hand() -> None:
    convolutions = (3 * 9 + 1) * 32 + (32 * 9 + 1) * 64 + (64 * 9 + 1) * 64
    fully_connected = (64 * 8 * 8 + 1) * 128 + (128 + 1) * 10
    assert parameter_count(on_meta("vgg5", norm="none")) == convolutions + fully_connected
    assert parameter_count(on_meta("vgg5", norm="group")) == convolutions + fully_connected + 2 * (32 + 64 + 64)


@pytest.mark.parametrize(
    ("name", "split_point", "input_shape", "cut"),
    [
        ("vgg5", 1, CIFAR, (32, 16, 16)),
        ("vgg5", 2, CIFAR, (64, 8, 8)),
        ("vgg5", 3, CIFAR, (4096,)),
        ("vgg5", 1, MNIST, (32, 14, 14)),
        ("resnet18", 1, CIFAR, (64, 8, 8)),
        ("resnet18", 9, CIFAR, (512,)),
        large("resnet101", 1, CIFAR, (64, 8, 8)),
        large("resnet101", 34, CIFAR, (2048,)),
        large("mobilenetv3_small", 1, CIFAR, (16, 16, 16)),
        large("mobilenetv3_small", 13, CIFAR, (576,)),
        large("mobilenetv3_small", 14, CIFAR, (1024,)),
        large("mobilenetv3_large", 1, CIFAR, (16, 16, 16)),
        large("mobilenetv3_large", 17, CIFAR, (960,)),
        large("mobilenetv3_large", 18, CIFAR, (1280,)),
        large("vgg16", 1, CIFAR, (64, 32, 32)),
        large("vgg16", 13, (3, 64, 64), (2048,)),
    ],
)
def test_cut_has_the_expected_shape(
    name: str, split_point: int, input_shape: tuple[int, int, int], cut: tuple[int, ...]
) -> None:
    assert shape_after(on_meta(name, input_shape), split_point, input_shape) == cut


def test_vgg5_sends_32_kib_per_sample_after_the_first_layer() -> None:
    model = build_model("vgg5", input_shape=CIFAR, classes=10)
    cut: Tensor = model[:1](torch.zeros(1, *CIFAR))
    assert cut.nbytes == 32 * 1024


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", by_size(*(name for name in NETWORKS if not name.startswith("vgg"))))
def test_convolution_has_a_bias_exactly_if_no_norm_follows(name: str, norm: str) -> None:
    model = on_meta(name, norm=norm)
    inside_gates = {id(conv) for module in model.modules() if hasattr(module, "excite") for conv in module.children()}
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convs) > len(inside_gates)
    for conv in convs:
        assert (conv.bias is not None) == (norm == "none" or id(conv) in inside_gates)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", NETWORKS)
def test_norm_is_the_one_asked_for(name: str, norm: str) -> None:
    model = on_meta(name, norm=norm)
    kinds = {"batch": nn.BatchNorm2d, "group": nn.GroupNorm}
    found = {kind for kind, layer in kinds.items() if any(isinstance(m, layer) for m in model.modules())}
    assert found == ({norm} if norm != "none" else set())
    assert uses_batch_statistics(model) == (norm == "batch")
    assert not uses_dropout(model)


@pytest.mark.parametrize(
    ("channels", "groups"), [(3, 1), (8, 1), (16, 2), (24, 3), (32, 4), (72, 9), (184, 23), (512, 32), (2048, 32)]
)
def test_groups_divide_the_channels_and_are_never_of_few_channels(channels: int, groups: int) -> None:
    assert group_count(channels) == groups
    assert channels % groups == 0


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("input_shape", [CIFAR, MNIST])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "resnet18" else ()) for n in SMALL])
def test_small_network_starts_with_a_finite_loss(name: str, input_shape: tuple[int, int, int], norm: str) -> None:
    check_start(name, input_shape, classes=10, norm=norm)


@pytest.mark.slow
@pytest.mark.parametrize(("input_shape", "norm"), [*((CIFAR, norm) for norm in NORMS), ((3, 64, 64), "group")])
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in SMALL])
def test_large_network_starts_with_a_finite_loss(name: str, input_shape: tuple[int, int, int], norm: str) -> None:
    check_start(name, input_shape, classes=100, norm=norm)


def check_start(name: str, input_shape: tuple[int, int, int], *, classes: int, norm: str) -> None:
    """An untrained network should have a loss near log(classes) and outputs that depend on its inputs."""
    model = build_model(name, input_shape=input_shape, classes=classes, norm=norm)
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn((8, *input_shape), generator=random)
    labels = torch.randint(classes, (8,), generator=random)
    logits: Tensor = model(inputs)
    loss = cross_entropy(logits, labels)
    torch.autograd.backward(loss)
    assert loss.item() < 2 * math.log(classes)
    assert logits.std(dim=0).max() > 1e-3, "all inputs look the same to the last layer"
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)


def test_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    one, same, other = (build_model("vgg5", input_shape=CIFAR, classes=10, seed=seed) for seed in (3, 3, 4))
    assert all(map(torch.equal, weights(one), weights(same)))
    assert not torch.equal(weights(one)[0], weights(other)[0])


def test_global_generator_is_neither_used_nor_moved() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = build_model("vgg5", input_shape=CIFAR, classes=10)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert all(map(torch.equal, weights(one), weights(build_model("vgg5", input_shape=CIFAR, classes=10))))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_float64_starts_from_the_weights_of_float32(name: str) -> None:
    single = build_model(name, input_shape=CIFAR, classes=10, norm="batch")
    double = build_model(name, input_shape=CIFAR, classes=10, norm="batch", dtype=torch.float64)
    assert all(parameter.dtype == torch.float64 for parameter in double.parameters())
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(weights(single), weights(double), strict=True))


@pytest.mark.parametrize(
    ("name", "input_shape"),
    [
        *((name, shape) for name in SMALL for shape in (MNIST, (1, 32, 32), CIFAR, (5, 33, 47))),
        *((name, shape) for name in NETWORKS if name not in SMALL for shape in (CIFAR, (3, 64, 64))),
        ("vgg16", (1, 32, 40)),
        ("vgg5", (1, 4, 4)),
        ("resnet18", (3, 17, 17)),
        ("mobilenetv3_large", (3, 17, 17)),
    ],
)
@pytest.mark.slow
def test_network_fits_the_input_it_was_built_for(name: str, input_shape: tuple[int, int, int]) -> None:
    check_fits(on_meta(name, input_shape), input_shape, classification(10))


@pytest.mark.parametrize(
    ("name", "input_shape", "least"),
    [("vgg5", (1, 3, 8), 4), ("vgg16", MNIST, 32), ("resnet18", (1, 8, 8), 17), ("resnet101", (3, 32, 16), 17)],
)
def test_input_too_small_is_refused_with_the_smallest_allowed(
    name: str, input_shape: tuple[int, int, int], least: int
) -> None:
    given = "x".join(map(str, input_shape))
    with pytest.raises(ModelError, match=f"{given} is too small for {name}, .* at least {least}x{least} .*resize"):
        build_model(name, input_shape=input_shape, classes=10)


@pytest.mark.parametrize("input_shape", [(0, 32, 32), (3, -32, 32), (32, 32)])
def test_shape_that_is_no_image_is_refused(input_shape: tuple[int, int, int]) -> None:
    with pytest.raises(ModelError, match="is not channels x height x width"):
        build_model("vgg5", input_shape=input_shape, classes=10)


def test_unknown_name_norm_and_too_few_classes_are_refused() -> None:
    with pytest.raises(ModelError, match="'vgg7': choose one of vgg5, resnet18, mobilenetv3_small, vgg16"):
        build_model("vgg7", input_shape=CIFAR, classes=10)
    with pytest.raises(ModelError, match="'layer': choose one of batch, group, none"):
        build_model("vgg5", input_shape=CIFAR, classes=10, norm="layer")
    with pytest.raises(ModelError, match="1 classes are too few for vgg5: at least 2"):
        build_model("vgg5", input_shape=CIFAR, classes=1)


class TwoPaths(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self[0](x)
        return first + x


def test_only_a_module_can_be_trained_and_a_sequential_needs_layers() -> None:
    model = nn.Linear(2, 2)
    assert check_module(model) is model
    with pytest.raises(ModelError, match=r"of type NoneType, but it must be a torch\.nn\.Module"):
        check_module(None)
    with pytest.raises(ModelError, match="without layers"):
        check_module(nn.Sequential())


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_weight_would_be_lost_in_copies_and_is_refused(register: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    handle = getattr(model[1].bias, register)(lambda _: None)
    with pytest.raises(ModelError, match=r"the model's 1\.bias has a hook on its gradient.*remove the hook"):
        check_module(model)
    handle.remove()
    assert check_module(model) is model


class Frozen(nn.Sequential):
    def train(self, mode: bool = True) -> Frozen:  # noqa: ARG002
        return super().train(False)


def test_a_sequential_with_its_own_forward_is_not_cut_after_its_children() -> None:
    assert is_sequential(nn.Sequential(nn.Linear(2, 2)))
    assert not is_sequential(TwoPaths(nn.Linear(2, 2)))
    assert not is_sequential(nn.Linear(2, 2))


def test_a_sequential_with_its_own_train_or_hooks_is_not_cut_after_its_children() -> None:
    assert not is_sequential(Frozen(nn.Linear(2, 2)))
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked.register_forward_hook(lambda _, __, output: 2 * output)
    assert not is_sequential(hooked)


def test_model_that_does_not_fit_the_data_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    check_fits(model, (3, 2, 2), classification(5))
    with pytest.raises(ModelError, match=r"does not take inputs of 3x2x3: .*shapes cannot be multiplied"):
        check_fits(model, (3, 2, 3), classification(5))
    with pytest.raises(ModelError, match=r"to \(2, 5\), but 4 classes need \(2, 4\)"):
        check_fits(model, (3, 2, 2), classification(4))
    with pytest.raises(ModelError, match="returns a tuple"):
        check_fits(nn.Sequential(nn.Flatten(), nn.LSTM(12, 5)), (3, 2, 2), classification(5))


@pytest.mark.parametrize(("low", "high"), [(0, 5000), (-1, 499)])
def test_a_token_beyond_the_vocabulary_is_named(low: int, high: int) -> None:
    model = nn.Sequential(nn.Embedding(500, 2), nn.Flatten(), nn.Linear(6, 5))
    check_fits(model, InputForm((TensorForm((3,), torch.int64, 0, 499),)), classification(5))
    beyond = InputForm((TensorForm((3,), torch.int64, low, high),))
    with pytest.raises(
        ModelError, match=rf"index out of range in self\. The values of the samples \(from {low} to {high}\)"
    ):
        check_fits(model, beyond, classification(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_check_changes_no_mode_statistic_or_gradient(dtype: torch.dtype) -> None:
    model = build_model("vgg5", input_shape=CIFAR, classes=10, norm="batch", dtype=dtype)
    model[1].eval()
    modes = [module.training for module in model.modules()]
    before = [tensor.clone() for tensor in weights(model)]
    check_fits(model, CIFAR, classification(10))
    with pytest.raises(ModelError):
        check_fits(model, (3, 16, 16), classification(10))
    assert [module.training for module in model.modules()] == modes
    assert all(map(torch.equal, weights(model), before))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.Dropout2d(0.5), True),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.MultiheadAttention(4, 2), False),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.1), True),
        (nn.Linear(4, 4), False),
    ],
)
def test_dropout_is_found_at_any_depth(layer: nn.Module, expected: bool) -> None:
    assert uses_dropout(nn.Sequential(nn.Sequential(layer))) == expected


def test_batch_statistics_are_those_of_batch_normalisation_only() -> None:
    assert uses_batch_statistics(nn.Sequential(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False))))
    assert not uses_batch_statistics(nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm(4)))


@pytest.fixture
def user_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's current directory; the import path is restored afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_factory_is_found_in_the_current_directory(user_directory: Path) -> None:
    (user_directory / "my_own_net.py").write_text("class Nets:\n    @staticmethod\n    def tiny():\n        return 7\n")
    assert load_factory("my_own_net:Nets.tiny")() == 7


def test_factory_of_an_installed_package_is_found() -> None:
    assert load_factory("pipar.networks.models:build_model") is build_model


@pytest.mark.parametrize("spec", ["", "module", "module:", ":function", "a b:c", "dir/file.py:f", "a..b:c", "a:b:c"])
def test_factory_of_another_form_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"is not of the form 'package\.module:function'"):
        load_factory(spec)


@pytest.mark.parametrize(
    ("source", "spec", "sentence"),
    [
        ("", "no_such_module_here:f", "no module 'no_such_module_here' is installed or in the current directory"),
        ("", "pipar.no_such_part:f", r"no module 'pipar\.no_such_part' is installed"),
        ("import no_such_neighbour\n", "needs_more:f", "needs_more could not be imported: .*no_such_neighbour"),
        ("1 / 0\n", "divides:f", "divides could not be imported: ZeroDivisionError: division by zero"),
        ("def f(:\n", "misspelt:f", "misspelt could not be imported: SyntaxError"),
        ("x = 1\n", "has_no_f:f", "has_no_f has no 'f': check the name"),
        ("f = 1\n", "number:f", "is of type int, not a function"),
    ],
)
def test_factory_that_cannot_be_loaded_is_one_sentence(
    user_directory: Path, source: str, spec: str, sentence: str
) -> None:
    if source:
        (user_directory / f"{spec.partition(':')[0]}.py").write_text(source)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_factory(spec)
    assert "\n" not in str(caught.value)


class Overwriting(nn.Module):
    """Changes what its own backward pass needs, which torch notices only then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output = torch.relu(self.layer(x))
        output += 1
        return output


def test_a_network_whose_own_step_fails_is_refused_with_a_sentence() -> None:
    form, task = InputForm.given((4,)), classification(3)
    check_step(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), form, task)
    check_fits(Overwriting(), form, task)
    with pytest.raises(
        ModelError,
        match=r"^the model cannot be trained, because a step on three samples fails: .*modified by an inplace",
    ):
        check_step(Overwriting(), form, task)


class Pairs(nn.Module):
    """Takes batches of two samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(2, 4))


def test_a_network_for_one_size_of_batches_is_refused_with_a_sentence() -> None:
    form, task = InputForm.given((4,)), classification(3)
    check_fits(Pairs(), form, task)
    with pytest.raises(ModelError, match=r"^the model cannot be trained, .* three samples fails: .*shape '\[2, 4\]'"):
        check_step(Pairs(), form, task)


class CountingForwards(nn.Sequential):
    """Counts its forwards, in eval mode as well."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(x)


def test_checks_leave_a_network_as_it_is() -> None:
    model, form, task = CountingForwards().train(), InputForm.given((4,)), classification(3)
    weight = model[0].weight
    check_fits(model, form, task)
    check_step(model, form, task)
    assert (model.forwards.item(), model.training, model[0].weight is weight, weight.grad) == (0, True, True, None)
