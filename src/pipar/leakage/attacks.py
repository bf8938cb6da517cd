"""Attacks that rebuild a device's inputs from its activations, with what the server of a training knows.

The server averages the devices' parts, so it knows their weights, and it may have other samples of the same kind. These
attacks are not the strongest possible: another attack may rebuild what they do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipar import random_streams
from pipar.tensors.inputs import as_rows

#: Called with the share of an attack that is done.
ShareDone = Callable[[float], None]

_DECODER_BATCH = 50
_DECODER_WIDTH = 32
_NARROWEST = 16


@dataclass(frozen=True)
class Attacker:
    """The attacker's knowledge: the device's layers, other samples, the scale of the noise, and the range of pixels."""

    part: nn.Sequential  # with its weights, in eval mode
    others: Tensor  # samples of the same kind, as network inputs; none of them is attacked
    noise: float  # standard deviation of the device's noise on its inputs
    lowest: Tensor  # pixel value per channel; broadcasts over samples
    highest: Tensor
    seed: int

    def inside(self, samples: Tensor) -> Tensor:
        """Return the samples with every pixel clamped to its range."""
        return torch.minimum(torch.maximum(samples, self.lowest), self.highest)


class Attack(Protocol):
    """A way to rebuild inputs from activations."""

    @property
    def description(self) -> str:
        """What the attack does, with its budget."""

    def effort(self, attacked: int, others: int) -> float:
        """Return the approximate cost for these numbers of samples, in forward passes of one sample."""

    def rebuild(self, attacker: Attacker, activations: Tensor, progress: ShareDone) -> Tensor:
        """Return estimates of the inputs that gave these activations, as network inputs."""


# --- optimising an input until it gives the same activations


@dataclass(frozen=True)
class PlainDescent:
    """argmin over x of ||f(x) - a||^2 by gradient descent from random black and white pixels: the simplest attack.

    f denotes the device's layers and a the activations.
    """

    steps: int
    rate: float

    @property
    def description(self) -> str:
        return f"{self.steps} steps of gradient descent (rate {self.rate:g}) on the input, from random pixels"

    def effort(self, attacked: int, others: int) -> float:  # noqa: ARG002 - it has no use for others
        return self.steps * attacked

    def rebuild(self, attacker: Attacker, activations: Tensor, progress: ShareDone) -> Tensor:
        shape = (len(activations), *attacker.others.shape[1:])
        white = torch.from_numpy(
            random_streams.generator(attacker.seed, "leakage", "random pixels").random(shape) < 0.5
        )
        guess = torch.where(white, attacker.highest, attacker.lowest).to(attacker.others.dtype)
        for step in range(self.steps):
            guess.requires_grad_()
            missed = (as_rows(attacker.part(guess)) - activations).square().sum()
            # Not backward(): the weights of the part must get no gradients.
            (slope,) = torch.autograd.grad(missed, [guess])
            guess = attacker.inside(guess.detach() - self.rate * slope)
            progress((step + 1) / self.steps)
        return guess


@dataclass(frozen=True)
class Descent:
    """argmin over x of ||f(x) - a||^2 / ||a||^2 + `smoothness` TV(x), by Adam from the mean of other samples.

    TV, the mean absolute difference of neighbouring pixels, is used for images only. The learning rate decays to 0
    along half a cosine.
    """

    steps: int
    learning_rate: float
    smoothness: float

    @property
    def description(self) -> str:
        smooth = f", with {self.smoothness:g} x total variation" if self.smoothness else ""
        return f"{self.steps} steps of Adam (rate {self.learning_rate:g}) on the input, from the mean image{smooth}"

    def effort(self, attacked: int, others: int) -> float:  # noqa: ARG002 - it has no use for others
        return self.steps * attacked

    def rebuild(self, attacker: Attacker, activations: Tensor, progress: ShareDone) -> Tensor:
        mean = attacker.others.mean(dim=0, keepdim=True)
        guess = mean.repeat(len(activations), *[1] * (mean.ndim - 1)).requires_grad_()
        optimizer = torch.optim.Adam([guess], lr=self.learning_rate)
        size = activations.flatten(1).square().sum(dim=1).clamp_min(1e-12)
        for step in range(self.steps):
            optimizer.param_groups[0]["lr"] = self.learning_rate * (1 + math.cos(math.pi * step / self.steps)) / 2
            missed = (as_rows(attacker.part(guess)) - activations).flatten(1).square().sum(dim=1) / size
            loss = (missed + self.smoothness * total_variation(guess)).sum()
            (guess.grad,) = torch.autograd.grad(loss, [guess])
            optimizer.step()
            with torch.no_grad():
                guess.copy_(attacker.inside(guess))
            progress((step + 1) / self.steps)
        return guess.detach()


def total_variation(samples: Tensor) -> Tensor:
    """Return each image's mean absolute difference of neighbouring pixels; 0 for samples that are not images."""
    if samples.ndim != 4:
        return samples.new_zeros(len(samples))
    down, right = samples.diff(dim=2).abs(), samples.diff(dim=3).abs()
    return down.flatten(1).mean(dim=1) + right.flatten(1).mean(dim=1)


# --- a network trained to invert the layers


@dataclass(frozen=True)
class Decoder:
    """A small network of transposed convolutions, trained on `images` other samples to map activations to inputs."""

    images: int
    epochs: int
    learning_rate: float = 4e-3

    @property
    def description(self) -> str:
        return f"a decoder of transposed convolutions, {self.epochs} epochs over up to {self.images:,} other images"

    def effort(self, attacked: int, others: int) -> float:  # noqa: ARG002 - only training counts
        return self.epochs * min(others, self.images)

    def rebuild(self, attacker: Attacker, activations: Tensor, progress: ShareDone) -> Tensor:
        others = attacker.others[: self.images]
        shape, scale = _shape_at_cut(attacker.part, others), _Scale.of(_seen(attacker, others[:_DECODER_BATCH], 0))
        batches = (batch for epoch in range(self.epochs) for batch in _shuffled(others, attacker.seed, epoch))
        count = self.epochs * -(-len(others) // _DECODER_BATCH)
        with _seeded(attacker.seed, "decoder"):
            decoder = build_decoder(shape, tuple(others.shape[1:])).to(others.dtype)
        optimizer = torch.optim.Adam(decoder.parameters(), lr=self.learning_rate)
        for number, batch in enumerate(batches, start=1):
            optimizer.param_groups[0]["lr"] = self.learning_rate * (1 + math.cos(math.pi * number / count)) / 2
            seen = scale.applied(_seen(attacker, batch, number)).view(len(batch), *shape)
            optimizer.zero_grad()
            functional.mse_loss(decoder(seen), batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            progress(number / count)
        decoder.eval()
        with torch.no_grad():
            rebuilt: Tensor = decoder(scale.applied(activations).view(len(activations), *shape))
        return attacker.inside(rebuilt)


@dataclass(frozen=True)
class _Scale:
    """Scales activations to mean 0 and standard deviation 1."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, activations: Tensor) -> _Scale:
        return cls(float(activations.mean()), max(1e-6, float(activations.std())))

    def applied(self, activations: Tensor) -> Tensor:
        return (activations - self.mean) / self.deviation


def build_decoder(seen: tuple[int, ...], wanted: tuple[int, ...]) -> nn.Sequential:
    """Return an untrained network from activations of shape `seen` to samples of shape `wanted`.

    For images, a feature map is doubled in size until it is as large as the image; activations that are not a map are
    first mapped to one with an eighth of the image's sides. For other samples there are two fully connected layers.
    """
    if len(wanted) != 3:
        return _to_vector(math.prod(seen), wanted)
    channels, height, width = wanted
    layers: list[nn.Module] = []
    if len(seen) != 3:
        small = (_DECODER_WIDTH, -(-height // 8), -(-width // 8))
        layers += [nn.Flatten(), nn.Linear(math.prod(seen), math.prod(small)), nn.ReLU(), nn.Unflatten(1, small)]
        seen = small
    features, high, wide = seen
    layers += [nn.Conv2d(features, _DECODER_WIDTH, 3, padding=1), nn.ReLU()]
    features = _DECODER_WIDTH
    while high < height or wide < width:
        narrower = max(_NARROWEST, features // 2)
        layers += [nn.ConvTranspose2d(features, narrower, 4, stride=2, padding=1), nn.ReLU()]
        features, high, wide = narrower, 2 * high, 2 * wide
    layers.append(nn.Conv2d(features, channels, 3, padding=1))
    if (high, wide) != (height, width):
        layers.append(nn.Upsample((height, width), mode="bilinear", align_corners=False))
    return nn.Sequential(*layers)


def _to_vector(values: int, wanted: tuple[int, ...]) -> nn.Sequential:
    hidden = 4 * _DECODER_WIDTH
    inner = [nn.Flatten(), nn.Linear(values, hidden), nn.ReLU(), nn.Linear(hidden, math.prod(wanted))]
    return nn.Sequential(*inner, nn.Unflatten(1, wanted))


def _shape_at_cut(part: nn.Sequential, samples: Tensor) -> tuple[int, ...]:
    """Return the shape of one sample's activations; if the last layer flattens them, the shape before that."""
    *_, last = (module for module in part.modules() if not any(True for _ in module.children()))
    before: list[tuple[int, ...]] = []
    hook = last.register_forward_hook(lambda _, inputs, __: before.append(tuple(inputs[0].shape[1:])))
    try:
        with torch.no_grad():
            output: Tensor = as_rows(part(samples[:1]))
    finally:
        hook.remove()
    return before[-1] if isinstance(last, nn.Flatten) else tuple(output.shape[1:])


def _seen(attacker: Attacker, samples: Tensor, number: int) -> Tensor:
    """Return the activations that a device would send for these samples."""
    with torch.no_grad():
        noised = with_noise(samples, attacker.noise, attacker.seed, "others", number)
        activations: Tensor = as_rows(attacker.part(noised))
    return activations


def with_noise(samples: Tensor, scale: float, seed: int, *key: str | int) -> Tensor:
    """Return the samples with Gaussian noise from the random stream of this key."""
    if not scale:
        return samples
    drawn = random_streams.generator(seed, "leakage noise", *key).normal(0.0, scale, tuple(samples.shape))
    return samples + torch.from_numpy(drawn).to(samples.dtype)


def _shuffled(samples: Tensor, seed: int, epoch: int) -> Iterator[Tensor]:
    """Yield all samples once, in batches."""
    order = torch.from_numpy(random_streams.generator(seed, "decoder order", epoch).permutation(len(samples)))
    for rows in torch.split(order, _DECODER_BATCH):
        yield samples[rows]


@contextmanager
def _seeded(seed: int, purpose: str) -> Iterator[None]:
    """Seed torch's generator for initial weights, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(random_streams.generator(seed, purpose).integers(2**63)))
        yield


#: By name, from the cheapest to the most expensive.
ATTACKS: dict[str, Attack] = {
    "small": PlainDescent(steps=25, rate=0.12),
    "long": Descent(steps=300, learning_rate=0.1, smoothness=0.05),
    "decoder": Decoder(images=5000, epochs=6),
}
