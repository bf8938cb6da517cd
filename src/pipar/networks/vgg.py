"""VGG-5 and VGG-16: plain convolutions, then fully connected layers."""

from __future__ import annotations

from torch import nn

from pipar.networks.blocks import Norm, he_init, hidden_linear, named

# One entry per convolution: (channels out, followed by max-pool).
VGG5_CONVS = ((32, True), (64, True), (64, False))
VGG16_CONVS = (
    *((64, False), (64, True)),
    *((128, False), (128, True)),
    *((256, False), (256, False), (256, True)),
    *((512, False), (512, False), (512, True)) * 2,
)


def vgg5(input_shape: tuple[int, int, int], classes: int, norm: str) -> nn.Sequential:
    """Return VGG-5, 5 layers: convolutions 32, 64, 64 and fully connected 128, classes."""
    return _vgg(input_shape, classes, Norm(norm), convs=VGG5_CONVS, hidden=(128,))


def vgg16(input_shape: tuple[int, int, int], classes: int, norm: str) -> nn.Sequential:
    """Return VGG-16, 16 layers: 13 convolutions and fully connected 4096, 4096, classes."""
    return _vgg(input_shape, classes, Norm(norm), convs=VGG16_CONVS, hidden=(4096, 4096))


def _vgg(
    input_shape: tuple[int, int, int],
    classes: int,
    norm: Norm,
    *,
    convs: tuple[tuple[int, bool], ...],
    hidden: tuple[int, ...],
) -> nn.Sequential:
    """Return the network whose layers are named by kind and place: conv1, conv2, ..., fc4, fc5."""
    channels, height, width = input_shape
    layers: dict[str, nn.Module] = {}
    for place, (outputs, pool) in enumerate(convs, start=1):
        last = place == len(convs)
        layers[f"conv{place}"] = _conv_layer(channels, outputs, norm, pool=pool, flatten=last)
        channels = outputs
        height, width = (height // 2, width // 2) if pool else (height, width)
    features = channels * height * width
    for place, outputs in enumerate(hidden, start=len(convs) + 1):
        layers[f"fc{place}"] = hidden_linear(features, outputs, nn.ReLU())
        features = outputs
    layers[f"fc{len(layers) + 1}"] = nn.Linear(features, classes)
    return named(layers)


def _conv_layer(inputs: int, outputs: int, norm: Norm, *, pool: bool, flatten: bool) -> nn.Sequential:
    """Return convolution, norm, ReLU, and the pooling and flattening that belong before a cut."""
    # Unlike the other networks, the standard VGG keeps the bias before a norm.
    conv = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)
    he_init(conv)
    layers: dict[str, nn.Module] = {"conv": conv, **norm.layers(outputs), "activation": nn.ReLU()}
    if pool:
        layers["pool"] = nn.MaxPool2d(2)
    if flatten:
        layers["flatten"] = nn.Flatten()
    return named(layers)
