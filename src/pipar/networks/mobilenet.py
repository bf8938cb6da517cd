"""MobileNetV3-Small and -Large: inverted residual blocks with depthwise convolutions and channel gates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pipar.networks.blocks import (
    RELU_GAIN,
    Norm,
    Residual,
    conv_norm,
    he_init,
    hidden_linear,
    init_branches_to_zero,
    named,
)

STEM_CHANNELS = 16


@dataclass(frozen=True)
class Bneck:
    """One row of the tables of Howard et al. (2019): kernel, expanded width, channels out, gate, stride."""

    kernel: int
    expanded: int
    outputs: int
    gate: bool
    hardswish: bool
    stride: int = 1

    def activation(self) -> nn.Module:
        """Return a new activation of this row's kind."""
        return nn.Hardswish() if self.hardswish else nn.ReLU()


SMALL = (
    Bneck(3, 16, 16, gate=True, hardswish=False, stride=2),
    Bneck(3, 72, 24, gate=False, hardswish=False, stride=2),
    Bneck(3, 88, 24, gate=False, hardswish=False),
    Bneck(5, 96, 40, gate=True, hardswish=True, stride=2),
    *(Bneck(5, 240, 40, gate=True, hardswish=True),) * 2,
    Bneck(5, 120, 48, gate=True, hardswish=True),
    Bneck(5, 144, 48, gate=True, hardswish=True),
    Bneck(5, 288, 96, gate=True, hardswish=True, stride=2),
    *(Bneck(5, 576, 96, gate=True, hardswish=True),) * 2,
)
LARGE = (
    Bneck(3, 16, 16, gate=False, hardswish=False),
    Bneck(3, 64, 24, gate=False, hardswish=False, stride=2),
    Bneck(3, 72, 24, gate=False, hardswish=False),
    Bneck(5, 72, 40, gate=True, hardswish=False, stride=2),
    *(Bneck(5, 120, 40, gate=True, hardswish=False),) * 2,
    Bneck(3, 240, 80, gate=False, hardswish=True, stride=2),
    Bneck(3, 200, 80, gate=False, hardswish=True),
    *(Bneck(3, 184, 80, gate=False, hardswish=True),) * 2,
    Bneck(3, 480, 112, gate=True, hardswish=True),
    Bneck(3, 672, 112, gate=True, hardswish=True),
    Bneck(5, 672, 160, gate=True, hardswish=True, stride=2),
    *(Bneck(5, 960, 160, gate=True, hardswish=True),) * 2,
)


def mobilenetv3_small(input_shape: tuple[int, int, int], classes: int, norm: str) -> nn.Sequential:
    """Return MobileNetV3-Small, 15 layers: a convolution, 11 blocks, widths 576 and 1024, the classifier."""
    return _mobilenet(input_shape[0], classes, norm, rows=SMALL, head=1024)


def mobilenetv3_large(input_shape: tuple[int, int, int], classes: int, norm: str) -> nn.Sequential:
    """Return MobileNetV3-Large, 19 layers: a convolution, 15 blocks, widths 960 and 1280, the classifier."""
    return _mobilenet(input_shape[0], classes, norm, rows=LARGE, head=1280)


def _mobilenet(channels: int, classes: int, kind: str, *, rows: tuple[Bneck, ...], head: int) -> nn.Sequential:
    """Return the network whose layers are named by kind and place: conv1, block2, ..., conv, fc, fc."""
    norm = Norm(kind, eps=1e-3, momentum=0.01)
    stem = conv_norm((channels, STEM_CHANNELS, 3), norm, stride=2, activation=nn.Hardswish())
    layers: dict[str, nn.Module] = {"conv1": stem}
    inputs = STEM_CHANNELS
    for place, row in enumerate(rows, start=2):
        layers[f"block{place}"] = _block(inputs, row, norm)
        inputs = row.outputs
    width = 6 * inputs
    layers[f"conv{len(layers) + 1}"] = _last_conv(inputs, width, norm)
    layers[f"fc{len(layers) + 1}"] = hidden_linear(width, head, nn.Hardswish())
    layers[f"fc{len(layers) + 1}"] = nn.Linear(head, classes)
    model = named(layers)
    if norm.absent:
        init_branches_to_zero(model)
    return model


def _last_conv(inputs: int, outputs: int, norm: Norm) -> nn.Sequential:
    """Return the last convolution with the average over the map, which belongs before the cut."""
    layer = conv_norm((inputs, outputs, 1), norm, activation=nn.Hardswish())
    layer.add_module("pool", nn.AdaptiveAvgPool2d(1))
    layer.add_module("flatten", nn.Flatten())
    return layer


def _block(inputs: int, row: Bneck, norm: Norm) -> nn.Module:
    """Return expansion, depthwise convolution, gate, projection; with a residual sum where shapes allow it."""
    expanded = row.expanded
    layers: dict[str, nn.Module] = {}
    if expanded != inputs:
        layers["expand"] = conv_norm((inputs, expanded, 1), norm, activation=row.activation())
    depthwise = (expanded, expanded, row.kernel)
    layers["depthwise"] = conv_norm(depthwise, norm, stride=row.stride, groups=expanded, activation=row.activation())
    if row.gate:
        layers["gate"] = Gate(expanded)
    layers["project"] = conv_norm((expanded, row.outputs, 1), norm, gain=_projection_gain(row, norm))
    branch = named(layers)
    return Residual(branch) if row.stride == 1 and inputs == row.outputs else branch


def _projection_gain(row: Bneck, norm: Norm) -> float:
    """Return the gain of the last convolution: He's, but twice that after a gate without a norm.

    Gates start half open, so without a norm the signal would vanish over the blocks.
    """
    return 2 * RELU_GAIN if norm.absent and row.gate else RELU_GAIN


class Gate(nn.Module):
    """Squeeze and excitation: scales each channel by a number in 0..1, computed from the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = _multiple_of_eight(channels // 4)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Conv2d(channels, squeezed, kernel_size=1)
        self.activation = nn.ReLU()
        self.excite = nn.Conv2d(squeezed, channels, kernel_size=1)
        self.openness = nn.Hardsigmoid()
        he_init(self.squeeze)
        he_init(self.excite)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with its channels scaled."""
        squeezed = self.activation(self.squeeze(self.mean(x)))
        scaled: Tensor = x * self.openness(self.excite(squeezed))
        return scaled


def _multiple_of_eight(channels: int) -> int:
    """Return the nearest multiple of 8 that is at least 8 and at least 90 % of the channels."""
    rounded = max(8, (channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded
