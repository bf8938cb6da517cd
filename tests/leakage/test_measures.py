"""Measures of leakage follow their definitions, and attacks rebuild inputs where that is possible."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from pipar.errors import DataError
from pipar.leakage.attacks import (
    ATTACKS,
    Attacker,
    Decoder,
    Descent,
    PlainDescent,
    build_decoder,
    total_variation,
    with_noise,
)
from pipar.leakage.measures import Samples, distance_correlation, measure_cuts, pixel_correlation, psnr_db

pytestmark = pytest.mark.usefixtures("one_thread")  # two threads are slower for such small networks


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- distance correlation


def test_distance_correlation_equals_the_one_computed_by_hand() -> None:
    # Distances of x are 1 2 3 1 2 1 for the pairs 12 13 14 23 24 34, U-centred -2/3 1/3 1/3 1/3 1/3 -2/3; of y, the
    # corners of a rectangle, 3 4 5 5 4 3, U-centred -1 0 1 1 0 -1. Over these pairs A.B = 2, A.A = 4/3, B.B = 4.
    x = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    y = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0], [3.0, 4.0]])
    assert distance_correlation(x, y) == pytest.approx(math.sqrt(2 / math.sqrt(4 / 3 * 4)), abs=1e-12)


def test_rotated_shifted_and_scaled_samples_have_a_distance_correlation_of_one() -> None:
    x = drawn(20, 6)
    turned, _ = torch.linalg.qr(drawn(6, 6, seed=1))
    assert distance_correlation(x, x) == pytest.approx(1.0)
    assert distance_correlation(x, 3 * x @ turned + 5) == pytest.approx(1.0)


def test_independent_samples_have_little_distance_correlation_even_with_many_more_values_than_samples() -> None:
    x, y = drawn(60, 3000), drawn(60, 3000, seed=1)
    assert distance_correlation(x, y) < 0.3
    assert distance_correlation(x, x + 0.5 * y) > 0.8


def test_constant_samples_have_no_distance_correlation_and_too_few_pairs_are_refused() -> None:
    assert distance_correlation(drawn(5, 2), torch.ones(5, 3)) == 0.0
    for x, y in ((3, 3), (5, 4)):
        with pytest.raises(DataError, match="4 pairs"):
            distance_correlation(drawn(x, 2), drawn(y, 2))


# --- pixels


def test_pixel_correlation_is_pearsons_over_the_pixels_of_each_image() -> None:
    first = torch.tensor([[[[0.0, 1.0], [2.0, 3.0]]]])
    # Of 0 1 2 3 and 0 2 1 3, both with the mean 1.5: (2.25 - 0.25 + ... ) = 4 over 5.
    swapped = torch.tensor([[[[0.0, 2.0], [1.0, 3.0]]]])
    assert pixel_correlation(first, swapped) == pytest.approx(4 / 5)
    assert pixel_correlation(first, 2 * first + 7) == pytest.approx(1.0)
    both = torch.cat([first, first])
    assert pixel_correlation(both, torch.cat([swapped, -first])) == pytest.approx((4 / 5 - 1) / 2)
    assert pixel_correlation(first, torch.full_like(first, 0.5)) == 0.0


def test_psnr_is_the_mean_over_images_in_decibel() -> None:
    black = torch.zeros(2, 1, 2, 2)
    off = torch.stack([torch.full((1, 2, 2), 0.1), torch.full((1, 2, 2), 0.01)])
    assert psnr_db(black, off) == pytest.approx((20 + 40) / 2, abs=1e-5)
    assert psnr_db(black, off, peak=10.0) == pytest.approx(50, abs=1e-5)
    assert psnr_db(black, black) == math.inf


def test_total_variation_is_between_neighbours_and_for_images_only() -> None:
    stripes = torch.tensor([0.0, 1.0]).repeat(4, 2).view(1, 1, 4, 4)
    assert float(total_variation(stripes)) == pytest.approx(1.0)
    assert float(total_variation(torch.ones(1, 7))) == 0.0


# --- attacks


def attacker(part: nn.Sequential, others: Tensor, noise: float = 0.0) -> Attacker:
    low, high = torch.tensor(0.0), torch.tensor(1.0)
    return Attacker(part.eval(), others, noise, low, high, seed=0)


def pictures(count: int, seed: int = 0) -> Tensor:
    """Return small images of grey tiles."""
    tiles = torch.rand(count, 1, 2, 2, generator=torch.Generator().manual_seed(seed))
    return tiles.repeat_interleave(4, 2).repeat_interleave(4, 3)


def quiet(_: float) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("attack", [PlainDescent(100, 0.2), Descent(200, 0.05, 0.0)])
def test_a_descent_recovers_the_input_of_a_layer_that_can_be_inverted(attack: PlainDescent | Descent) -> None:
    turn, _ = torch.linalg.qr(drawn(64, 64))
    linear = nn.Linear(64, 64)
    with torch.no_grad():
        linear.weight.copy_(turn)
    part, inputs = nn.Sequential(nn.Flatten(), linear), pictures(3)
    shares: list[float] = []
    with torch.no_grad():
        seen = part(inputs)
    found = attack.rebuild(attacker(part, pictures(9, seed=1)), seen, shares.append)
    assert pixel_correlation(inputs, found) > 0.999
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert linear.weight.grad is None


@pytest.mark.slow
def test_a_decoder_learns_from_other_images_to_invert_layers_unless_they_keep_nothing() -> None:
    torch.manual_seed(0)
    part = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    nothing = nn.Sequential(*part, nn.Threshold(1e9, 0))
    others, inputs = pictures(200, seed=1), pictures(8)
    rebuilt = {}
    for name, layers in (("pooled", part), ("nothing", nothing)):
        with torch.no_grad():
            seen = layers(inputs)
        rebuilt[name] = Decoder(200, 12).rebuild(attacker(layers, others), seen, quiet)
    assert pixel_correlation(inputs, rebuilt["pooled"]) > 0.9
    assert pixel_correlation(inputs, rebuilt["nothing"]) < 0.3


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        ((64, 8, 8), (3, 32, 32)),
        ((16, 32, 32), (3, 32, 32)),
        ((32, 5, 7), (1, 28, 30)),
        ((128,), (1, 28, 28)),
        ((10,), (7,)),
        ((4, 3, 3), (2, 5)),
    ],
)
def test_a_decoder_maps_any_shape_to_any_other(seen: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    assert build_decoder(seen, wanted)(torch.zeros(2, *seen)).shape == (2, *wanted)


def test_noise_depends_only_on_its_key_and_is_none_at_scale_0() -> None:
    samples = torch.zeros(3, 5)
    assert with_noise(samples, 0.0, 0, "a") is samples
    assert torch.equal(with_noise(samples, 2.0, 0, "a", 1), with_noise(samples, 2.0, 0, "a", 1))
    assert not torch.equal(with_noise(samples, 2.0, 0, "a", 1), with_noise(samples, 2.0, 0, "a", 2))
    assert float(with_noise(torch.zeros(10_000), 2.0, 0, "a").std()) == pytest.approx(2.0, rel=0.05)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    hidden = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU())
    return nn.Sequential(hidden, nn.Sequential(nn.MaxPool2d(4), nn.Flatten()), nn.Linear(24, 3))


def samples() -> Samples:
    own = pictures(40)
    return Samples(own[:6], own, pictures(100, seed=1), torch.tensor(0.0), torch.tensor(1.0))


@pytest.mark.slow
def test_all_cuts_are_measured_by_all_attacks_and_the_effort_adds_up() -> None:
    reported: list[tuple[str, float]] = []
    attacks = {"small": PlainDescent(20, 0.1), "decoder": Decoder(100, 2)}
    found = measure_cuts(
        network(), samples(), [1, 2], attacks, progress=lambda what, share: reported.append((what, share))
    )
    assert [cut.split_point for cut in found.cuts] == [1, 2]
    assert all(set(cut.attacks) == {"small", "decoder"} for cut in found.cuts)
    assert set(found.pictures) == {(p, name) for p in (1, 2) for name in attacks}
    assert all(made.shape == (6, 1, 8, 8) and 0 <= made.min() <= made.max() <= 1 for made in found.pictures.values())
    assert [share for _, share in reported] == sorted(share for _, share in reported)
    assert reported[-1] == ("Attacking P=2: decoder", pytest.approx(1.0))


@pytest.mark.slow
def test_measuring_twice_gives_the_same_result_and_noise_on_the_inputs_hides_them() -> None:
    attacks = {"decoder": Decoder(100, 4)}
    one, same = (measure_cuts(network(), samples(), [1], attacks) for _ in range(2))
    noisy = measure_cuts(network(), samples(), [1], attacks, noise=3.0)
    assert one.cuts == same.cuts
    assert noisy.cuts[0].distance_correlation < one.cuts[0].distance_correlation
    assert noisy.cuts[0].leakage < one.cuts[0].leakage


def test_descriptions_of_attacks_state_their_budget() -> None:
    assert list(ATTACKS) == ["small", "long", "decoder"]
    assert all(any(letter.isdigit() for letter in one.description) for one in ATTACKS.values())
    assert ATTACKS["small"].effort(16, 5000) < ATTACKS["long"].effort(16, 5000)
