"""The building blocks of all networks: convolution with its norm, residual sum, initial weights."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn

NORMS = ("batch", "group", "none")

RELU_GAIN = math.sqrt(2.0)
MAX_GROUPS = 32
MIN_CHANNELS_PER_GROUP = 8


@dataclass(frozen=True)
class Norm:
    """The normalisation after a convolution: one of NORMS, with its constants."""

    kind: str
    eps: float = 1e-5
    momentum: float = 0.1

    @property
    def absent(self) -> bool:
        """True without normalisation: convolutions then need a bias and careful initial weights."""
        return self.kind == "none"

    def layers(self, channels: int) -> dict[str, nn.Module]:
        """Return {"norm": layer} for this number of channels; {} for the kind "none"."""
        if self.kind == "batch":
            return {"norm": nn.BatchNorm2d(channels, eps=self.eps, momentum=self.momentum)}
        if self.kind == "group":
            return {"norm": nn.GroupNorm(group_count(channels), channels, eps=self.eps)}
        return {}


def group_count(channels: int) -> int:
    """Return the largest number of groups that divides the channels: at most 32, each of at least 8 channels.

    Deep layers have maps of one pixel, where a group of one channel would be normalised to a constant.
    """
    most = min(MAX_GROUPS, channels // MIN_CHANNELS_PER_GROUP)
    return next((groups for groups in range(most, 1, -1) if channels % groups == 0), 1)


def named(layers: dict[str, nn.Module]) -> nn.Sequential:
    """Return the layers in this order as one nn.Sequential that keeps their names."""
    return nn.Sequential(OrderedDict(layers))


def conv_norm(
    shape: tuple[int, int, int],
    norm: Norm,
    *,
    stride: int = 1,
    groups: int = 1,
    gain: float = RELU_GAIN,
    activation: nn.Module | None = None,
) -> nn.Sequential:
    """Return convolution, norm and activation for a shape (channels in, channels out, kernel size).

    The convolution keeps the size of the map, divided by its stride, and has a bias only if no norm follows.
    """
    inputs, outputs, kernel = shape
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=norm.absent)
    layers: dict[str, nn.Module] = {"conv": conv, **norm.layers(outputs)}
    if activation is not None:
        layers["activation"] = activation
    he_init(conv, gain)
    return named(layers)


def he_init(layer: nn.Conv2d | nn.Linear, gain: float = RELU_GAIN) -> None:
    """Draw the weights from N(0, gain^2 / fan_in) and set the bias to zero; He et al. 2015.

    fan_in preserves the scale of activations in depthwise convolutions too; torch's fan_out is too large there by the
    number of groups.
    """
    fan_in = layer.weight[0].numel()
    nn.init.normal_(layer.weight, std=gain / math.sqrt(fan_in))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def hidden_linear(inputs: int, outputs: int, activation: nn.Module) -> nn.Sequential:
    """Return a fully connected layer with its activation and He's initial weights."""
    linear = nn.Linear(inputs, outputs)
    he_init(linear)
    return named({"linear": linear, "activation": activation})


class Residual(nn.Module):
    """branch(x) + shortcut(x); the shortcut is the identity unless the block changes the shape."""

    def __init__(self, branch: nn.Sequential, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = nn.Identity() if shortcut is None else shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum, without an activation."""
        total: Tensor = self.branch(x) + self.shortcut(x)
        return total


def init_branches_to_zero(model: nn.Module) -> None:
    """Initialise every residual branch to output zero, so that a deep network starts as a shallow one.

    With a norm, the weight of the last norm in a branch starts at zero (Goyal et al. 2017). Without one, the last of a
    branch's m convolutions starts at zero, and the others are scaled by L^(-1 / (2m - 2)) for L branches (Fixup,
    Zhang et al. 2019); otherwise each block adds to the activations, and the loss starts in the millions.
    """
    branches = [module.branch for module in model.modules() if isinstance(module, Residual)]
    for branch in branches:
        *inner, last = (unit for unit in branch if isinstance(unit, nn.Sequential))
        if "norm" in last._modules:
            _scale(last[1], 0.0)
            continue
        _scale(last[0], 0.0)
        for unit in inner:
            _scale(unit[0], len(branches) ** (-1 / (2 * len(inner))))


def _scale(layer: Tensor | nn.Module, factor: float) -> None:
    """Multiply the weight of a convolution or norm."""
    assert isinstance(layer, nn.Conv2d | nn.BatchNorm2d | nn.GroupNorm)
    layer.weight.data.mul_(factor)
