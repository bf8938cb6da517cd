"""What a forward depends on besides samples and weights is noticed: it decides what a run is labelled."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipar.cutting.exporting import NoRecordingError, recorded
from pipar.cutting.forward_effects import ForwardEffects, effects_of, unrecorded_state
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


class OfTheBatch(nn.Module):
    """Weighs by the number of samples."""

    def forward(self, values: Tensor) -> Tensor:
        return values / len(values)


class OfPython(nn.Module):
    """Leaves out a layer at random, by a generator that is not torch's."""

    def __init__(self, drawn: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.drawn = nn.Linear(4, 4), drawn

    def forward(self, values: Tensor) -> Tensor:
        return values + self.layer(values) if self.drawn() < 0.999 else values


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, values: Tensor) -> Tensor:
        return values + torch.rand(4, generator=self.generator, dtype=values.dtype) * 1e-12


class Warming(nn.Module):
    """Counts its forwards in a number, and does something else after the first thousand."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, values: Tensor) -> Tensor:
        self.forwards += 1
        return values if self.forwards < 1000 else 2 * values


class Remembering(nn.Module):
    """Sets a number once, and keeps what it last computed."""

    length = 0
    last: Tensor | None = None

    def forward(self, values: Tensor) -> Tensor:
        self.length, self.last = values.shape[1], values
        return values


class Clipping(nn.Module):
    def __init__(self, *, unnoticed: bool = False) -> None:
        super().__init__()
        self.factor, self.unnoticed = nn.Parameter(torch.full((4,), 3.0)), unnoticed

    def forward(self, values: Tensor) -> Tensor:
        with torch.no_grad():
            (self.factor.data if self.unnoticed else self.factor).clamp_(0.5, 2.0)
        return values * self.factor


class OwnNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drawing = np.random.default_rng(0)

    def forward(self, values: Tensor) -> Tensor:
        return values if self.drawing.random() < 2 else -values


class Alternating(nn.Module):
    """What it does next is in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [1.0, 2.0]

    def forward(self, values: Tensor) -> Tensor:
        self.factors.reverse()
        return values * self.factors[0]


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


class Placed(nn.Module):
    """Adds to each sample its place in the batch."""

    def forward(self, values: Tensor) -> Tensor:
        return values + torch.arange(len(values)).unsqueeze(1)


def test_the_place_in_the_batch_is_noticed() -> None:
    assert effects_of(sequence(Placed()), EXAMPLE) == ForwardEffects(mixes_samples=True)


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
    with pytest.raises(NoRecordingError, match="each forward changes its attribute forwards"):
        recorded(Annealed(), EXAMPLE)
    moving = nn.Sequential(nn.BatchNorm1d(4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), nn.Dropout(0.5))
    assert unrecorded_state(moving, EXAMPLE) is None


@pytest.mark.parametrize("module", [Counting(in_place=True), Counting(in_place=False), Deciding(), Warming()])
def test_what_is_done_once_for_each_forward_is_noticed(module: nn.Module) -> None:
    assert effects_of(sequence(module), EXAMPLE) == ForwardEffects(counts_forwards=True)


@pytest.mark.parametrize("unnoticed", [False, True])
def test_a_forward_that_writes_to_its_weights_is_noticed(unnoticed: bool) -> None:
    effects = effects_of(sequence(Clipping(unnoticed=unnoticed)), EXAMPLE)
    assert effects == ForwardEffects(counts_forwards=True, writes_weights=True)
    assert hides_effects(nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 3)), torch.zeros(2, 3).long())


def test_the_number_of_samples_and_generators_of_others_are_noticed() -> None:
    assert effects_of(sequence(OfTheBatch()), EXAMPLE) == ForwardEffects(mixes_samples=True)
    assert effects_of(sequence(OwnGenerator()), EXAMPLE).is_random
    for drawn in (lambda: random.random(), lambda: np.random.rand()):
        state, of_numpy = random.getstate(), np.random.get_state()[2]
        assert effects_of(sequence(OfPython(drawn)), EXAMPLE).is_random
        assert (random.getstate(), np.random.get_state()[2]) == (state, of_numpy)  # the user's draws stay as they are
    assert effects_of(sequence(Remembering()), EXAMPLE) == ForwardEffects()


@pytest.mark.parametrize(
    ("module", "cause"),
    [
        (OfPython(lambda: random.random()), "its forward draws random numbers of Python or numpy"),
        (OfPython(lambda: np.random.rand()), "its forward draws random numbers of Python or numpy"),
        (OwnNumpy(), "each forward changes its attribute 1.drawing"),
        (Alternating(), "a second forward differs from the first, as with a counter that is no buffer"),
        (Warming(), "each forward changes its attribute 1.forwards"),
        (Clipping(), "its forward writes to the parameter 1.factor"),
        (Clipping(unnoticed=True), "its forward writes to the parameter 1.factor"),
        (Remembering(), None),
        (nn.BatchNorm1d(4), None),
    ],
)
def test_what_a_recording_would_do_the_same_every_time_is_told(module: nn.Module, cause: str | None) -> None:
    assert unrecorded_state(sequence(module), EXAMPLE) == cause


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
