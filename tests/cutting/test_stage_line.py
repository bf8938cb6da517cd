"""A network that is not an nn.Sequential is a line of stages; cut anywhere, it trains as the uncut one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.networks import Attention, Block, Branching, Encoder, Guarded, Recurrent, Residual, Tied, UNet, sentences
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pipar.cutting import stage_line as line_module
from pipar.cutting.cut_check import differs
from pipar.cutting.listing import layer_cuts
from pipar.cutting.split import join_states, named_layers, split_model
from pipar.cutting.stage_line import Line, line_of, line_of_stages, thinned, whole_line
from pipar.cutting.traced import CutPoint, TracedNetwork
from pipar.data.user_samples import dataset_images
from pipar.errors import ModelError
from pipar.networks.models import build_model, uses_batch_statistics, uses_dropout
from pipar.nn.micro_batches import Decoded
from pipar.nn.optimizers import sgd
from pipar.nn.shared_part import SharedServerPart
from pipar.tasks.task import classification
from pipar.tensors.inputs import Inputs, call, tensors_of

EXAMPLE = torch.zeros(2, 1, 4, 4, dtype=torch.float64)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "residual": Residual,
    "batch norm": lambda: Residual(norm=nn.BatchNorm2d),
    "u-net": UNet,
    "attention": Attention,
    "recurrent": Recurrent,
    "tied": Tied,
    "no grad": Guarded,
    "spectral norm": lambda: Guarded(spectral=True),
}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def lines() -> dict[str, Line]:
    torch.manual_seed(0)
    return {name: line_of(make().double(), EXAMPLE) for name, make in NETWORKS.items()}


def step(module: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    F.cross_entropy(module(inputs), labels).backward()
    return gradients(module)


def cross(device: nn.Module, server: nn.Module, inputs: Inputs, labels: Tensor) -> None:
    """Train both parts on a batch, with copies of what crosses between them."""
    outputs = tensors_of(call(device, inputs))
    crossed = [output.detach().requires_grad_(output.requires_grad) for output in outputs]
    F.cross_entropy(server(*(one.clone() for one in crossed)), labels).backward()
    ends = [(output, one.grad) for output, one in zip(outputs, crossed, strict=True) if output.requires_grad]
    torch.autograd.backward([output for output, _ in ends], [gradient for _, gradient in ends])


def gradients(*modules: nn.Module) -> dict[str, Tensor]:
    return {name: w.grad for module in modules for name, w in module.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("samples", [2, 5])
def test_every_cut_has_the_gradients_and_buffers_of_the_uncut_network(
    name: str, samples: int, lines: dict[str, Line]
) -> None:
    line, whole = lines[name], copy.deepcopy(lines[name].whole).train()
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 1, 4, 4, dtype=torch.float64, generator=generator)
    labels = torch.arange(samples) % 10
    expected = step(whole, inputs, labels)
    assert len(line) > 1
    for split_point in range(1, len(line)):
        device, server = (copy.deepcopy(part) for part in split_model(line, split_point))
        cross(device, server, inputs, labels)
        found = gradients(device, server)
        assert found.keys() == expected.keys()
        for weight, gradient in expected.items():
            torch.testing.assert_close(found[weight], gradient, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(join_states(device.state_dict(), server.state_dict()), dict(whole.state_dict()))


@pytest.mark.parametrize("name", NETWORKS)
def test_names_of_weights_are_those_of_the_users_module(name: str, lines: dict[str, Line]) -> None:
    line = lines[name]
    assert list(line.state_dict()) == list(line.whole.state_dict())
    for split_point in range(1, len(line)):
        device, server = split_model(line, split_point)
        assert not device.state_dict().keys() & server.state_dict().keys()
        assert join_states(device.state_dict(), server.state_dict()).keys() == line.whole.state_dict().keys()
        own = dict(line.whole.named_parameters())
        assert all(weight is own[path] for path, weight in device.named_parameters())


def test_a_call_of_the_whole_line_is_a_call_of_the_users_module() -> None:
    line = line_of(Residual(norm=nn.BatchNorm2d), EXAMPLE.float())
    inputs = torch.rand(3, 1, 4, 4)
    line.eval()
    torch.testing.assert_close(line(inputs), line.whole.eval()(inputs), rtol=0, atol=0)
    assert not line.whole.training


@pytest.fixture(scope="module")
def encoder() -> Line:
    torch.manual_seed(0)
    return line_of(Encoder().double(), dataset_images(sentences(2)).images)


def test_a_network_that_takes_a_dictionary_is_cut_like_any_other(encoder: Line) -> None:
    batch = dataset_images(sentences(5, seed=1))
    labels = batch.labels
    whole = copy.deepcopy(encoder.whole).train()
    F.cross_entropy(whole(**batch.images), labels).backward()
    assert len(encoder) > 5
    assert encoder.whole.forward.__func__ is Encoder.forward
    for split_point in range(1, len(encoder)):
        device, server = (copy.deepcopy(part) for part in split_model(encoder, split_point))
        cross(device, server, batch.images, labels)
        torch.testing.assert_close(gradients(device, server), gradients(whole), rtol=1e-12, atol=1e-14)


def test_cuts_are_named_after_the_module_that_ends_there(lines: dict[str, Line]) -> None:
    names = list(named_layers(lines["residual"]))
    assert names == ["pool", "layer1.0.norm, relu", "layer1.0", "layer1.1.norm, relu", "dropout", "output"]
    assert list(named_layers(lines["tied"])) == ["decoder, tanh", "output"]


def test_a_weight_on_both_sides_is_named_as_the_reason() -> None:
    points = TracedNetwork.of(Tied().double(), EXAMPLE).cut_points()
    reasons = {point.reason for point in points if point.reason}
    assert any("decoder.weight is used on both sides" in str(reason) for reason in reasons)


def test_a_network_whose_way_depends_on_values_is_refused_with_a_sentence() -> None:
    where = r"its operations depend on the values of its inputs in networks\.py:\d+, `return self\.one\(flat\) if"
    with pytest.raises(ModelError, match=rf"Branching cannot be cut, because .* {where}.*--method fl"):
        line_of(Branching().double(), EXAMPLE)


class TwoOutputs(Residual):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def test_a_network_that_returns_two_tensors_is_refused_with_a_sentence() -> None:
    with pytest.raises(ModelError, match="returns 2 tensors, but it must return one tensor of logits"):
        line_of(TwoOutputs(), EXAMPLE.float())


def test_a_network_that_is_not_cut_is_one_stage() -> None:
    network = Branching()
    line = whole_line(network.double(), EXAMPLE)
    assert len(line) == 1
    device, server = split_model(line, 1)
    assert (list(device.state_dict()), list(server.state_dict())) == (list(network.state_dict()), [])


class OverTheBatch(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class RandomResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("network", [Residual(dropout=0.5), RandomResidual()], ids=["module", "function"])
def test_dropout_is_recognised_also_as_a_function(network: nn.Module) -> None:
    assert uses_dropout(whole_line(network.double(), EXAMPLE))
    assert not uses_dropout(whole_line(Residual(norm=nn.BatchNorm2d).double(), EXAMPLE))


class MaskedTwice(nn.Module):
    """One random mask, used in two places; it is drawn before another one."""

    def __init__(self, *, without_gradient: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 10)
        self.without_gradient = without_gradient

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.without_gradient):
            keep = torch.empty(x.shape[0], 1, dtype=x.dtype).bernoulli_(0.5)
        states = F.relu(F.dropout(self.first(x.flatten(1)), 0.5, self.training) * keep)
        return self.head(F.relu(self.second(states) * keep))


@pytest.mark.parametrize("without_gradient", [False, True])
def test_a_random_mask_is_drawn_once_and_crosses(without_gradient: bool) -> None:
    torch.manual_seed(0)
    line = line_of(MaskedTwice(without_gradient=without_gradient).double(), EXAMPLE)
    assert len(line) == 3
    assert line.effects.is_random
    device, server = split_model(line, 1)
    crossing = tensors_of(device(EXAMPLE))
    assert [tuple(one.shape) for one in crossing] == [(2, 8), (2, 1)]
    before = torch.get_rng_state()
    server(*crossing)
    assert torch.equal(torch.get_rng_state(), before)


def test_parts_know_how_much_of_a_batch_running_averages_take() -> None:
    line = line_of(Residual(norm=lambda width: nn.BatchNorm2d(width, momentum=0.3)).double(), EXAMPLE)
    _, server = split_model(line, 1)
    known = {path: module.momentum for path, module in server.named_modules() if hasattr(module, "momentum")}
    assert known == {"layer1.0.norm": 0.3, "layer1.1.norm": 0.3}
    part = SharedServerPart(copy.deepcopy(server), sgd(), task=classification(10))
    part.forward(Decoded(torch.rand(3, 4, 2, 2, dtype=torch.float64), torch.arange(3), 3, 3.0))
    assert sum(name.endswith("running_var") for name in part._batch_statistics()) == 2


@pytest.mark.parametrize(
    ("make", "mixes"),
    [
        (lambda: Residual(dropout=0.5), False),
        (lambda: Residual(norm=nn.BatchNorm2d), True),
        (OverTheBatch, True),
        (Attention, False),
        (RandomResidual, False),
    ],
    ids=["group norm and dropout", "batch norm", "a mean over the batch", "attention", "functional dropout"],
)
def test_a_network_in_which_samples_influence_each_other_is_recognised(
    make: Callable[[], nn.Module], mixes: bool
) -> None:
    torch.manual_seed(0)
    network = make().double()
    line = whole_line(network, EXAMPLE)
    assert uses_batch_statistics(line) == mixes


class Keeping(Residual):
    """Keeps a table that it makes once, and what it has last seen."""

    table: Tensor | None = None
    seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, 4, dtype=x.dtype)
        self.seen = self.stem(x)
        return super().forward(x * self.table)


def test_attributes_that_a_forward_sets_stay_as_they_are() -> None:
    network = Keeping().double()
    line = line_of(network, EXAMPLE)
    assert len(line) > 3
    assert (network.table, network.seen) == (None, None)
    assert not differs(line, EXAMPLE)


class Numbered(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) < 4 else super().forward(2 * x)


def test_a_network_that_decides_by_the_number_of_samples_is_not_recorded() -> None:
    with pytest.raises(ModelError, match="depend on the number of samples in a batch"):
        line_of(Numbered().double(), EXAMPLE)


class Drawing(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand(4, generator=self.generator, dtype=x.dtype))


def test_a_network_with_a_generator_of_its_own_is_not_recorded() -> None:
    with pytest.raises(ModelError, match="each forward changes its attribute generator"):
        line_of(Drawing().double(), EXAMPLE)


class TiedByMemory(nn.Module):
    """Two parameters with one memory: a step of either changes both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.two.weight = nn.Parameter(self.one.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        states = torch.relu(self.one(torch.relu(self.first(x))))
        return self.last(torch.relu(self.two(states)))


def test_a_network_is_not_cut_between_two_parameters_with_one_memory() -> None:
    line = line_of(TiedByMemory(), torch.zeros(2, 4))
    assert list(line.stages) == ["first, relu", "two, relu", "output"]
    assert line.cuts is not None
    assert "one.weight is used on both sides" in {one.reason for one in line.cuts.not_offered}


class Rotary(Residual):
    """Its table of angles is computed without gradients, which torch.export records as operations of their own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            angles = torch.arange(4, dtype=x.dtype).cos() + x.mean((1, 2, 3), keepdim=True)
        return super().forward(x * angles)


def test_operations_without_gradients_are_recorded_like_any_other() -> None:
    line = line_of(Rotary().double(), EXAMPLE)
    assert len(line) > 3
    assert not differs(line, EXAMPLE)


class Settled(nn.Sequential):
    """A network that keeps its normalisation in eval mode."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def train(self, mode: bool = True) -> Settled:
        super().train(mode)
        self[1].eval()
        return self


def test_a_networks_own_train_is_called_and_a_cut_that_would_lose_it_is_found() -> None:
    line = line_of_stages({name: copy.deepcopy(layer) for name, layer in Settled().named_children()}, Settled())
    assert not line.train().whole.get_submodule("1").training
    assert not split_model(line, 3)[0].train().whole.get_submodule("1").training
    network = Settled()
    assert differs(line_of_stages(dict(network.named_children()), network), torch.zeros(2, 4))


def test_a_stage_that_computes_something_else_is_found(lines: dict[str, Line]) -> None:
    assert not differs(lines["residual"], EXAMPLE)
    wrong = copy.deepcopy(lines["residual"])
    name = next(iter(wrong.stages))
    wrong.stages[name] = nn.Sequential(wrong.stages[name], nn.Hardtanh(-1e-3, 1e-3))
    assert differs(wrong, EXAMPLE)


def test_a_network_whose_operations_fix_its_dtype_is_checked_in_it() -> None:
    line = line_of(Recurrent(), EXAMPLE.float())
    assert len(line) == len(line_of(Recurrent().double(), EXAMPLE)) > 2
    name = list(line.stages)[1]
    line.stages[name] = nn.Sequential(line.stages[name], nn.Hardtanh(-1e-3, 1e-3))
    assert differs(line, EXAMPLE.float())


class Moved(Residual):
    """Moves a tensor to the device of another one, which torch.export records with the dtype that it has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * 1.1).to(self.stem.weight.device))


class Normalised(Moved):
    """Computes a part in float32 whatever its dtype, as the root mean square normalisation of language models does."""

    def forward(self, x: Tensor) -> Tensor:
        precise = x.to(torch.float32)
        return super().forward(
            (precise * torch.rsqrt(precise.square().mean((1, 2, 3), keepdim=True) + 1e-6)).to(x.dtype)
        )


@pytest.mark.parametrize("network", [Moved, Normalised])
def test_a_network_that_moves_tensors_is_checked_in_both_dtypes(network: type[Moved]) -> None:
    line = line_of(network(), EXAMPLE.float())
    assert len(line) > 3
    assert network is Normalised or len(line) == len(line_of(Moved().double(), EXAMPLE))
    name = list(line.stages)[1]
    line.stages[name] = nn.Sequential(line.stages[name], nn.Hardtanh(-1e-3, 1e-3))
    assert differs(line, EXAMPLE.float())


def test_a_cut_that_fails_the_check_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def differs_at_layer1(line: Line, _: Tensor) -> bool:
        return "layer1.0" in line.stages

    monkeypatch.setattr(line_module, "differs", differs_at_layer1)
    names = list(line_of(Residual().double(), EXAMPLE).stages)
    assert names == ["pool", "layer1.0.norm, relu", "layer1.1.norm, relu", "dropout", "output"]


def test_no_more_cuts_are_offered_than_can_be_measured() -> None:
    class Deep(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.layer1 = nn.Sequential(*(Block(4, None) for _ in range(40)))

    line = line_of(Deep().double(), EXAMPLE)
    assert 12 < len(line) <= line_module.MOST_CUTS + 1


def place(after: int, size: int) -> CutPoint:
    """Return a cut at which `size` values of a sample cross."""
    graph = fx.Graph()
    value = graph.placeholder("value")
    value.meta["val"] = torch.empty(2, size)
    return CutPoint(after, f"layer{after}", (value,))


def test_of_cuts_with_the_same_work_before_them_the_one_with_the_fewest_bytes_is_offered() -> None:
    points = [place(number, size) for number, size in enumerate([5, 3, 3, 4, 9, 1])]
    assert [point.after for point in thinned(points, [1, 1, 1, 1, 2, 2])] == [2, 5]


def test_cuts_inside_blocks_are_left_out_before_those_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors cross inside a block, and one between two blocks; the second half of the network is narrower."""
    monkeypatch.setattr(line_module, "MOST_CUTS", 6)
    sizes = [8, 16, 16, 8, 16, 16, 4, 8, 8, 4]
    points = [place(number, size) for number, size in enumerate(sizes)]
    assert [point.after for point in thinned(points, range(1, 11))] == [0, 3, 5, 6, 8, 9]
    monkeypatch.setattr(line_module, "MOST_CUTS", 4)
    assert [point.after for point in thinned(points, range(1, 11))] == [0, 3, 6, 9]


class Wrapped(nn.Module):
    """A network of pipar that is not an nn.Sequential."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers = build_model(name, input_shape=(3, 32, 32), classes=10, norm="group")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


@pytest.mark.parametrize("name", ["vgg5", "resnet18", "mobilenetv3_small"])
def test_cuts_of_a_wrapped_sequence_include_those_after_its_children(name: str) -> None:
    """`benchmarks.automatic_cuts` compares all networks of the paper."""
    network, example = Wrapped(name), torch.zeros(2, 3, 32, 32)
    cuts = line_of(network, example).cuts
    assert cuts is not None
    found = {cut.after: cut.size_bytes for cut in cuts.cuts}
    wanted = layer_cuts(dict(network.layers.named_children()), example, "children").cuts
    assert len(wanted) >= 4
    assert {f"layers.{cut.after}": cut.size_bytes for cut in wanted}.items() <= found.items()


def test_a_line_in_another_dtype_has_its_buffers_there_too() -> None:
    line = line_of(Residual(norm=nn.BatchNorm2d), EXAMPLE.float()).double()
    device, _ = split_model(line, 2)
    device(EXAMPLE)
    before = line.state_dict()
    assert all(tensor.dtype == torch.float64 for tensor in before.values() if tensor.is_floating_point())
    assert any(int(tensor) == 1 for name, tensor in before.items() if name.endswith("num_batches_tracked"))


class PassingOn(nn.Module):
    """Passes on whatever it is given, as the wrappers of adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Residual()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.network(*args, **kwargs)


def test_a_wrapper_that_passes_its_inputs_on_is_cut_like_what_it_wraps() -> None:
    wrapped, bare = (line_of(network.double(), EXAMPLE) for network in (PassingOn(), Residual()))
    assert len(wrapped) == len(bare) > 1
