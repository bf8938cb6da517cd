"""What a forward depends on besides samples and weights is noticed: it decides what a run is labelled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipar.cutting.exporting import NoRecordingError, recorded
from pipar.cutting.forward_effects import ForwardEffects, effects_of, remembers
from pipar.networks.models import hides_effects

EXAMPLE = torch.zeros(2, 4)


class RarelyRandom(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values * (torch.rand(len(values), 1, dtype=values.dtype) > 1e-6)


class Centred(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(0)


class Counting(nn.Module):
    """Counts its forwards, in place or by a new tensor."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))
        self.in_place = in_place

    def forward(self, values: Tensor) -> Tensor:
        if self.in_place:
            self.forwards += 1
        else:
            self.forwards = self.forwards + 1
        return values


class Deciding(nn.Module):
    """Its samples in the tests do not reach the limit."""

    def forward(self, values: Tensor) -> Tensor:
        return values * 2 if values.sum() > 1e6 else values


def sequence(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *between, nn.Linear(4, 3))


def test_random_numbers_and_batch_statistics_are_noticed_where_they_change_nothing_and_after_zeros() -> None:
    assert effects_of(sequence(RarelyRandom()), EXAMPLE) == ForwardEffects(is_random=True)
    dropping = sequence(nn.BatchNorm1d(4), nn.Dropout(0.5))
    nn.init.zeros_(dropping[3].weight)
    assert effects_of(dropping, EXAMPLE) == ForwardEffects(mixes_samples=True, is_random=True)
    assert effects_of(sequence(nn.GroupNorm(2, 4)), EXAMPLE) == ForwardEffects()


class LikeTheFirst(nn.Module):
    """Uses the first sample, or the last one, for all."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, values: Tensor) -> Tensor:
        return values + values[self.place]


@pytest.mark.parametrize("place", [0, -1])
def test_one_sample_that_is_used_for_all_is_noticed(place: int) -> None:
    assert effects_of(sequence(LikeTheFirst(place)), EXAMPLE) == ForwardEffects(mixes_samples=True)


class Annealed(nn.Module):
    """Counts its forwards in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0
        self.layer = nn.Linear(4, 3)

    def forward(self, values: Tensor) -> Tensor:
        self.forwards += 1
        return self.layer(values) / self.forwards


def test_a_network_that_counts_in_an_attribute_is_not_recorded() -> None:
    assert effects_of(Annealed(), EXAMPLE).counts_forwards
    with pytest.raises(NoRecordingError, match="a second forward differs from the first"):
        recorded(Annealed(), EXAMPLE)
    moving = nn.Sequential(nn.BatchNorm1d(4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), nn.Dropout(0.5))
    assert not remembers(moving, EXAMPLE)


@pytest.mark.parametrize("module", [Counting(in_place=True), Counting(in_place=False), Deciding()])
def test_what_is_done_once_for_each_forward_is_noticed(module: nn.Module) -> None:
    assert effects_of(sequence(module), EXAMPLE) == ForwardEffects(counts_forwards=True)


class Several(nn.Module):
    """Returns what only a loss of the user's own takes."""

    def __init__(self, *, mean: bool) -> None:
        super().__init__()
        self.mean = mean

    def forward(self, values: Tensor) -> dict[str, Tensor | tuple[Tensor, ...]]:
        other = values.mean() if self.mean else values.argmax(1)
        return {"values": values, "others": (other, values > 0)}


@pytest.mark.parametrize("mean", [False, True])
def test_networks_may_return_several_tensors(mean: bool) -> None:
    assert effects_of(nn.Sequential(nn.Linear(4, 3), Several(mean=mean)), EXAMPLE) == ForwardEffects(mixes_samples=mean)


def test_recorded_operations_decide_nothing() -> None:
    assert effects_of(sequence(Deciding()), EXAMPLE, is_recorded=True) == ForwardEffects()
    assert effects_of(sequence(Counting(in_place=True)), EXAMPLE, is_recorded=True).counts_forwards


@pytest.mark.parametrize(
    ("between", "hidden"),
    [
        ([nn.BatchNorm1d(4), nn.Dropout(0.5)], False),
        ([nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))], True),
        ([Centred()], True),
        ([RarelyRandom()], True),
        ([Deciding()], True),
        ([Centred(), nn.BatchNorm1d(4)], False),
        ([nn.Identity()], False),
    ],
)
def test_a_sequence_hides_what_the_classes_of_its_modules_do_not_show(between: list[nn.Module], hidden: bool) -> None:
    assert hides_effects(sequence(*between), EXAMPLE) == hidden
