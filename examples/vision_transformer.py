"""A small vision transformer in plain PyTorch, on the digits images that come with scikit-learn.

    pipar compare examples/vision_transformer.toml --methods fl,sfl,pipar --virtual

The page docs/examples/vision-transformer.md has what was measured.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention between the patches of an image, and two linear layers for each patch."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self._attention(self.before_attention(x)))
        return x + self.mlp(x)

    def _attention(self, x: Tensor) -> Tensor:
        # (samples, patches, width) to three tensors of (samples, heads, patches, width of a head)
        q, k, v = self.queries_keys_values(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class VisionTransformer(nn.Module):
    """An image as a sequence of patches; the mean of their outputs is classified."""

    def __init__(self, *, size: int = 32, patch: int = 8, width: int = 128, depth: int = 6, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(patches)).mean(1))


def network() -> nn.Module:
    """Return the network of the example: 6 blocks of width 128 on 16 patches, 0.8 million parameters."""
    return VisionTransformer()


def tiny() -> nn.Module:
    """Return one that is trained in a second, to try things out."""
    return VisionTransformer(width=16, depth=2)
