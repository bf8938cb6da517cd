"""A U-Net in plain PyTorch finds the pixels of handwritten digits on a spotted background.

    pipar compare examples/unet.toml --methods fl,pipar --virtual

The digits are those that come with scikit-learn, so nothing has to be downloaded. The page docs/examples/unet.md has
what was measured.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

SIZE = 32  # of an image; a digit is half as wide and high
CLASSES = 2  # background, digit
INK = 0.5  # a pixel with more of it belongs to a digit
#: How many digits each has to itself; an image has two of them.
DIGITS = {"device-1": 300, "device-2": 300, "device-3": 300, "device-4": 300, "validation": 197, "test": 400}


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions; with group normalisation, the training is exact."""
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        # No bias: normalisation has its own, and Adam would follow the rounding of a gradient that is almost 0.
        layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Three resolutions down and up again; each way up also sees what the way down saw there."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.classify = nn.Conv2d(width, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down1(images)
        coarse = self.down2(functional.max_pool2d(fine, 2))
        x = self.bottom(functional.max_pool2d(coarse, 2))
        x = self.up2(torch.cat([coarse, functional.interpolate(x, scale_factor=2)], 1))
        x = self.up1(torch.cat([fine, functional.interpolate(x, scale_factor=2)], 1))
        return self.classify(x)


def network() -> nn.Module:
    """Return the network of the example: 0.1 million parameters."""
    return UNet()


def tiny() -> nn.Module:
    """Return one that is trained in a second, to try things out."""
    return UNet(width=4)


def images(name: str) -> list[tuple[Tensor, Tensor]]:
    """Return the images of a device or a held-out set with their masks; no digit is in two sets."""
    first = sum(count for other, count in DIGITS.items() if list(DIGITS).index(other) < list(DIGITS).index(name))
    digits, draw = _digits(), torch.Generator().manual_seed(first)
    return [_image(digits[at : at + 2], draw) for at in range(first, first + DIGITS[name] - 1, 2)]


def few(name: str) -> list[tuple[Tensor, Tensor]]:
    """Return the first ten images of each, to try things out."""
    return images(name)[:10]


@cache
def _digits() -> Tensor:
    """Return the ink of every digit, from 0 to 1, in an order that is the same everywhere."""
    from sklearn.datasets import load_digits  # takes a second, which the network alone does not need

    ink = torch.tensor(load_digits().images / 16, dtype=torch.float32)
    order = torch.randperm(len(ink), generator=torch.Generator().manual_seed(0))
    return functional.interpolate(ink[order, None], size=(SIZE // 2, SIZE // 2), mode="bilinear")[:, 0]


def _image(inks: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return an image with a digit somewhere in its left half and one in its right half, and its mask."""
    image, mask = _texture(draw), torch.zeros(SIZE, SIZE, dtype=torch.uint8)
    half = SIZE // 2
    for side, ink in enumerate(inks):
        top = int(torch.randint(half + 1, (), generator=draw))
        place = (slice(top, top + half), slice(side * half, (side + 1) * half))
        image[place] = (1 - ink) * image[place] + ink * (0.5 + 0.5 * torch.rand((), generator=draw))
        mask[place] = ink > INK
    return image[None], mask


def _texture(draw: torch.Generator) -> Tensor:
    """Return spots as wide as the strokes of a digit, and about as bright."""
    spots = torch.rand(1, 1, SIZE // 4, SIZE // 4, generator=draw)
    smooth = functional.interpolate(spots, size=(SIZE, SIZE), mode="bicubic")[0, 0].clamp(0, 1)
    return 0.6 * smooth + 0.1 * torch.rand(SIZE, SIZE, generator=draw)
