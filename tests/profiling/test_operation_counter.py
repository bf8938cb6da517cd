"""Counts equal those by hand, whether the network or only its shapes run, and do not change the network."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pipar.cutting.stage_line import line_of
from pipar.networks.models import build_model
from pipar.profiling.operation_counter import count_layers
from pipar.profiling.operation_counts import Counts, LayerCount, PassCount, known_counts, network_sizes

SHAPE = (3, 8, 8)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Flatten()),
        nn.Linear(64, 5),
    )


@pytest.mark.slow
def test_a_convolution_is_counted_as_by_hand() -> None:
    first, second, last = count_layers(network(), SHAPE, run=True)
    macs = 4 * 64 * 27
    assert first.forward == PassCount(macs, 0, 2 * 256 + 256 + 2 * 64, 4 * 27 + 4, 3)
    assert (first.backward.dense, first.backward.grouped) == (macs, 0)
    assert (first.outputs, first.parameters) == (64, 4 * 27 + 4)
    assert (second.forward.dense, second.forward.grouped) == (0, 4 * 16 * 9)
    assert second.backward.grouped == 2 * second.forward.grouped
    assert (last.forward.dense, last.backward.dense) == (320, 640)
    assert (last.outputs, last.parameters) == (5, 325)


def test_saved_memory_is_the_first_input_the_tensors_of_autograd_and_the_output_once() -> None:
    first, second, last = count_layers(network(), SHAPE, run=True)
    # Input, ReLU's result (which pooling keeps, too), the pooled output; pooling keeps an index of 8 bytes for each.
    assert (first.saved, first.other_saved_bytes) == (192 + 256 + 64, 64 * 8)
    assert second.saved == 64
    assert last.saved == 5 + 5  # the logits and their log-softmax
    assert last.other_saved_bytes == 8  # the label


@pytest.mark.slow
def test_working_memory_is_what_a_backward_holds_in_addition() -> None:
    first, second, _ = count_layers(network(), SHAPE, run=True)
    # The gradient of pooling's input and that of ReLU's, minus what pooling has freed.
    assert 256 <= first.working <= 3 * 256
    assert 64 <= second.working <= 3 * 64


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_running_on_few_samples_counts_the_same_except_peak_memory(norm: str) -> None:
    model = build_model("vgg5", input_shape=(1, 28, 28), classes=10, norm=norm)
    on_meta, real = count_layers(model, (1, 28, 28)), count_layers(model, (1, 28, 28), run=True)
    for counted, ran in zip(on_meta, real, strict=True):
        assert _without_working(counted) == _without_working(ran)
    assert on_meta[0].working == real[0].working
    known = known_counts("vgg5", norm, (1, 28, 28), 10)
    assert known is not None
    known = tuple(_counted(layer) for layer in known)
    assert known[:-1] == on_meta[:-1]
    assert _without_working(known[-1]) == _without_working(on_meta[-1])
    assert known[-1].working >= on_meta[-1].working


def _counted(layer: LayerCount) -> LayerCount:
    """Return a layer without its measured values."""
    return replace(layer, rectified=False, shares={})


def _without_working(layer: LayerCount) -> list[object]:
    return [value for name, value in vars(layer).items() if name != "working"]


@pytest.mark.slow
def test_counters_of_batch_normalisation_are_bytes_and_the_rest_depends_on_the_dtype() -> None:
    model = nn.Sequential(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192)), nn.Linear(192, 5))
    counts = count_layers(model, SHAPE, run=True)
    assert (counts[0].parameters, counts[0].other_parameter_bytes) == (4 * 192, 8)
    sizes = network_sizes(counts, "mine", "float64")
    assert sizes.parameter_bytes == (4 * 192 * 8 + 8, (192 * 5 + 5) * 8)
    assert sizes.output_bytes == (192 * 8, 5 * 8)
    assert count_layers(model.double(), SHAPE, run=True) == counts


class Peeking(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * float(inputs.abs().max())


@pytest.mark.slow
def test_a_layer_that_inspects_its_values_is_counted_too() -> None:
    counts = count_layers(nn.Sequential(Peeking(), nn.Flatten(), nn.Linear(192, 5)), SHAPE)
    assert [layer.outputs for layer in counts] == [192, 192, 5]
    assert counts[0].parameters == 0


class Scaled(nn.Module):
    """Names a device and a dtype, as the recording of a network does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.ones(x.shape[0], 1, dtype=self.dtype, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("run", [False, True])
def test_a_network_recorded_in_float64_counts_as_in_float32(run: bool) -> None:
    def counted(dtype: torch.dtype) -> Counts:
        return count_layers(nn.Sequential(Scaled(dtype), nn.Linear(4, 2)).to(dtype), (4,), run=run)

    assert counted(torch.float64) == counted(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("run", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_model_and_random_numbers_stay_unchanged(run: bool) -> None:
    model = nn.Sequential(network(), nn.Dropout(0.5), nn.BatchNorm1d(5)).eval()
    before, state = copy.deepcopy(model), torch.get_rng_state()
    count_layers(model, SHAPE, run=run)
    assert not model.training
    assert torch.equal(torch.get_rng_state(), state)
    for (name, tensor), (_, kept) in zip(before.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(tensor, kept), name
    assert all(parameter.grad is None for parameter in model.parameters())


class Picking(nn.Module):
    """How many values it picks depends on them, so only a run can count it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + x[x > 0].sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_recorded_network_that_picks_values_is_counted_in_its_own_dtype(dtype: torch.dtype) -> None:
    network = nn.Sequential(nn.Linear(4, 3), Picking(), nn.Linear(3, 2)).to(dtype)
    line = line_of(network, torch.rand(2, 4, dtype=dtype))
    assert sum(layer.parameters for layer in count_layers(line, (4,), run=True)) == 15 + 8
