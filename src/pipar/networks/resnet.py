"""ResNet-18 and ResNet-101: residual blocks of two convolutions, or of three with a narrow middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from pipar.networks.blocks import Norm, Residual, conv_norm, init_branches_to_zero, named

STAGE_WIDTHS = (64, 128, 256, 512)
BOTTLENECK_EXPANSION = 4

# (channels in, width of the stage, stride, norm) -> the convolutions of one block
Branch = Callable[[int, int, int, Norm], nn.Sequential]


def resnet18(input_shape: tuple[int, int, int], classes: int, norm: str) -> nn.Sequential:
    """Return ResNet-18, 10 layers: a convolution, 8 blocks, the classifier."""
    return _resnet(input_shape[0], classes, Norm(norm), blocks=(2, 2, 2, 2), branch=_basic, expansion=1)


def resnet101(input_shape: tuple[int, int, int], classes: int, norm: str) -> nn.Sequential:
    """Return ResNet-101, 35 layers: a convolution, 33 bottlenecks, the classifier.

    The paper's table lists other block widths; these are the standard stages of 3, 4, 23 and 3 blocks.
    """
    stages = (3, 4, 23, 3)
    expansion = BOTTLENECK_EXPANSION
    return _resnet(input_shape[0], classes, Norm(norm), blocks=stages, branch=_bottleneck, expansion=expansion)


def _resnet(
    channels: int, classes: int, norm: Norm, *, blocks: tuple[int, ...], branch: Branch, expansion: int
) -> nn.Sequential:
    """Return the network whose layers are named by kind and place: conv1, block2, ..., the last fc."""
    layers: dict[str, nn.Module] = {"conv1": _stem(channels, norm)}
    inputs = STAGE_WIDTHS[0]
    for place, (width, stride) in enumerate(_block_plan(blocks), start=2):
        outputs = width * expansion
        last = place == sum(blocks) + 1
        block = Residual(branch(inputs, width, stride, norm), _shortcut(inputs, outputs, stride, norm))
        layers[f"block{place}"] = _block_layer(block, last=last)
        inputs = outputs
    layers[f"fc{len(layers) + 1}"] = nn.Linear(inputs, classes)
    model = named(layers)
    # With the usual initial weights, ResNet-101 with group norm diverges at the default learning rate and momentum: on
    # digits the loss rose from 2.6 to 40 within 30 iterations. ResNet-18 learns faster with the usual ones.
    if norm.absent or branch is _bottleneck:
        init_branches_to_zero(model)
    return model


def _block_plan(blocks: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield (width, stride) of each block: every stage but the first halves the map in its first block."""
    for width, count in zip(STAGE_WIDTHS, blocks, strict=True):
        for index in range(count):
            yield width, 2 if index == 0 and width != STAGE_WIDTHS[0] else 1


def _stem(channels: int, norm: Norm) -> nn.Sequential:
    """Return the first layer; it reduces height and width to a quarter."""
    layer = conv_norm((channels, STAGE_WIDTHS[0], 7), norm, stride=2, activation=nn.ReLU())
    layer.add_module("pool", nn.MaxPool2d(3, stride=2, padding=1))
    return layer


def _block_layer(block: Residual, *, last: bool) -> nn.Sequential:
    """Return the block with its ReLU; the last one also averages over the map."""
    layers: dict[str, nn.Module] = {"residual": block, "activation": nn.ReLU()}
    if last:
        layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    return named(layers)


def _basic(inputs: int, width: int, stride: int, norm: Norm) -> nn.Sequential:
    """Return two 3x3 convolutions; the second one's ReLU follows the residual sum."""
    return named(
        {
            "first": conv_norm((inputs, width, 3), norm, stride=stride, activation=nn.ReLU()),
            "second": conv_norm((width, width, 3), norm),
        }
    )


def _bottleneck(inputs: int, width: int, stride: int, norm: Norm) -> nn.Sequential:
    """Return 1x1, 3x3, 1x1 convolutions, with the stride in the 3x3 so that no pixel is ignored."""
    return named(
        {
            "reduce": conv_norm((inputs, width, 1), norm, activation=nn.ReLU()),
            "middle": conv_norm((width, width, 3), norm, stride=stride, activation=nn.ReLU()),
            "expand": conv_norm((width, width * BOTTLENECK_EXPANSION, 1), norm),
        }
    )


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module | None:
    """Return a 1x1 convolution if the block changes the shape, else None."""
    if inputs == outputs and stride == 1:
        return None
    return conv_norm((inputs, outputs, 1), norm, stride=stride)
