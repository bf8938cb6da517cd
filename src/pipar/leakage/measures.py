"""How much activations reveal about the inputs: the measures, and the measurement of all cuts of a network.

Each measure is 0 if nothing is revealed, and grows with what is. None is a guarantee: another attack may find more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipar.cutting.split import split_model
from pipar.errors import DataError
from pipar.leakage.attacks import Attack, Attacker, with_noise
from pipar.leakage.table import MAX_DB, CutLeakage, RebuildQuality
from pipar.tensors.inputs import as_rows

#: Called with what is being done, and the share of all work that is done.
Progress = Callable[[str, float], None]

#: The bias-corrected distance correlation divides by n - 3.
MIN_COMPARED = 4
#: Samples whose activations are computed at a time.
_AT_ONCE = 100


# --- measures


def distance_correlation(x: Tensor, y: Tensor) -> float:
    """Return the bias-corrected distance correlation of n pairs (x_i, y_i): from 0, independent, to 1, similar.

    With a_ij = |x_i - x_j| and, for i != j, the U-centred
        A_ij = a_ij - sum_l a_il / (n - 2) - sum_k a_kj / (n - 2) + sum_kl a_kl / ((n - 1)(n - 2)),  A_ii = 0
    (B of y likewise) and (A . B) = sum_{i != j} A_ij B_ij / (n (n - 3)), it is the square root of
        R = (A . B) / sqrt((A . A)(B . B)),
    or 0 if R < 0, which half of all independent samples give (Szekely and Rizzo, 2013 and 2014). Their classic
    estimate, without the correction, tends to 1 for any pairs when a sample has more values than there are samples, as
    images do.
    """
    if len(x) != len(y) or len(x) < MIN_COMPARED:
        raise DataError(
            f"A distance correlation needs at least {MIN_COMPARED} pairs, but {len(x)} and {len(y)} samples are given."
        )
    a, b = (_u_centred(torch.cdist(flat, flat)) for flat in (x.flatten(1).double(), y.flatten(1).double()))
    both = float((a * a).sum()) * float((b * b).sum())
    if both <= 0:
        return 0.0  # one of them is constant
    return math.sqrt(min(1.0, max(0.0, float((a * b).sum()) / math.sqrt(both))))


def _u_centred(distances: Tensor) -> Tensor:
    n = len(distances)
    rows = distances.sum(dim=1, keepdim=True) / (n - 2)
    centred = distances - rows - rows.T + distances.sum() / ((n - 1) * (n - 2))
    return centred.fill_diagonal_(0.0)


def pixel_correlation(originals: Tensor, rebuilt: Tensor) -> float:
    """Return Pearson's correlation over all pixels and channels of an image, averaged over the images.

    The correlation with a constant image is 0.
    """
    x, y = (images.flatten(1).double() for images in (originals, rebuilt))
    x, y = (values - values.mean(dim=1, keepdim=True) for values in (x, y))
    sizes = x.norm(dim=1) * y.norm(dim=1)
    return float(torch.where(sizes > 0, (x * y).sum(dim=1) / sizes.clamp_min(1e-300), 0.0).mean())


def psnr_db(originals: Tensor, rebuilt: Tensor, peak: float = 1.0) -> float:
    """Return 10 log10(peak^2 / MSE) of an image in dB, averaged over the images; infinite if one is rebuilt exactly."""
    errors = (originals.double() - rebuilt.double()).flatten(1).square().mean(dim=1)
    return float((10 * torch.log10(peak**2 / errors)).mean())


# --- all cuts of a network


@dataclass(frozen=True)
class Samples:
    """The attacked samples and the attacker's, as network inputs; `lowest` is a pixel of 0, `highest` of 1."""

    attacked: Tensor
    compared: Tensor  # for the distance correlation
    others: Tensor
    lowest: Tensor
    highest: Tensor

    def pixels(self, samples: Tensor) -> Tensor:
        """Return samples as images with pixels from 0 to 1."""
        return ((samples - self.lowest) / (self.highest - self.lowest)).clamp(0, 1)

    def guess(self) -> float:
        """Return the pixel correlation of the mean of other samples: a guess without any activation."""
        mean = self.others.mean(dim=0, keepdim=True).expand_as(self.attacked)
        return pixel_correlation(self.pixels(self.attacked), self.pixels(mean))


@dataclass(frozen=True)
class CutMeasurements:
    """The leakage of each cut, and the rebuilt images by split point and attack."""

    cuts: tuple[CutLeakage, ...]
    pictures: Mapping[tuple[int, str], Tensor]


def measure_cuts(
    model: nn.Sequential,
    samples: Samples,
    split_points: Sequence[int],
    attacks: Mapping[str, Attack],
    *,
    seed: int = 0,
    noise: float = 0.0,
    progress: Progress = lambda _, __: None,
) -> CutMeasurements:
    """Return what the activations at each split point reveal, with `noise` added to the inputs.

    The model is in eval mode: without dropout, and with the running statistics of batch normalisation.
    """
    model.eval()
    cuts, pictures = [], {}
    efforts = {name: one.effort(len(samples.attacked), len(samples.others)) for name, one in attacks.items()}
    done, whole = 0.0, len(split_points) * sum(efforts.values())
    for p in split_points:
        part, _ = split_model(model, p)
        attacker = Attacker(part, samples.others, noise, samples.lowest, samples.highest, seed)
        activations = _activations(part, with_noise(samples.attacked, noise, seed, "attacked"))
        compared = _activations(part, with_noise(samples.compared, noise, seed, "compared"))
        rebuilt = {}
        for name, attack in attacks.items():

            def share_done(share: float, name: str = name, p: int = p, before: float = done) -> None:
                progress(f"Attacking P={p}: {name}", (before + share * efforts[name]) / whole)

            share_done(0.0)
            made = samples.pixels(attack.rebuild(attacker, activations, share_done))
            rebuilt[name] = _likeness(samples.pixels(samples.attacked), made)
            pictures[p, name] = made
            done += efforts[name]
        cuts.append(CutLeakage(p, distance_correlation(samples.compared, compared), rebuilt))
    return CutMeasurements(tuple(cuts), pictures)


def _activations(part: nn.Sequential, samples: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([as_rows(part(some)) for some in torch.split(samples, _AT_ONCE)])


def _likeness(originals: Tensor, made: Tensor) -> RebuildQuality:
    return RebuildQuality(pixel_correlation(originals, made), min(MAX_DB, psnr_db(originals, made)))
