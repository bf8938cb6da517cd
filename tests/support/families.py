"""Small networks of known families, written as their libraries write them, and samples for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.networks import Encoder, UNet, sentences

Norm = Callable[[int], nn.Module]
Samples = list[tuple[Any, int]]


def group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(2, width)


# --- ResNet-18, as torchvision writes it


class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int, downsample: nn.Module | None, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = norm(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = norm(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Two blocks in each of four layers, of which all but the first halve the image."""

    def __init__(self, norm: Norm = group_norm, width: int = 2, layers: Sequence[int] = (2, 2, 2, 2)) -> None:
        super().__init__()
        self.inplanes = width
        self.conv1 = nn.Conv2d(1, width, 7, 2, 3, bias=False)
        self.bn1 = norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        for number, blocks in enumerate(layers, start=1):
            planes = width * 2 ** (number - 1)
            setattr(self, f"layer{number}", self._layer(planes, blocks, 1 if number == 1 else 2, norm))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(self.inplanes, 3)

    def _layer(self, planes: int, blocks: int, stride: int, norm: Norm) -> nn.Sequential:
        downsample = None
        if stride != 1:
            downsample = nn.Sequential(nn.Conv2d(self.inplanes, planes, 1, stride, bias=False), norm(planes))
        made = [BasicBlock(self.inplanes, planes, stride, downsample, norm)]
        self.inplanes = planes
        return nn.Sequential(*made, *(BasicBlock(planes, planes, 1, None, norm) for _ in range(1, blocks)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


# --- a vision transformer, as torchvision writes it


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, heads, dropout=0.0, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, given: Tensor) -> Tensor:
        x = self.ln_1(given)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = x + given
        return x + self.mlp(self.ln_2(x))


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 8, patch: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(1, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.randn(1, 5, width) / 10)
        self.layers = nn.Sequential(*(EncoderBlock(width, 2) for _ in range(blocks)))
        self.ln = nn.LayerNorm(width)
        self.heads = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_proj(x)
        x = x.reshape(x.shape[0], x.shape[1], -1).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.heads(self.ln(self.layers(x + self.pos_embedding))[:, 0])


# --- GPT-2, as transformers writes it


class GPT2Block(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("bias", torch.tril(torch.ones(length, length, dtype=torch.bool)), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.c_attn(self.ln_1(hidden)).split(hidden.shape[-1], dim=2)
        query, key, value = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in split)
        weights = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        lowest = torch.full([], torch.finfo(weights.dtype).min, dtype=weights.dtype)
        weights = torch.where(self.bias[: hidden.shape[1], : hidden.shape[1]], weights, lowest).softmax(-1)
        hidden = hidden + self.c_proj((weights @ value).transpose(1, 2).flatten(2))
        return hidden + self.c_out(F.gelu(self.c_fc(self.ln_2(hidden)), approximate="tanh"))


class GPT2(nn.Module):
    """Predicts the next token; with `tied`, by the weights that embed tokens, otherwise it classifies a text."""

    def __init__(self, *, tied: bool, vocabulary: int = 30, width: int = 8, length: int = 5) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(GPT2Block(width, 2, length) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary if tied else 3, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.h:
            hidden = block(hidden)
        return self.lm_head(self.ln_f(hidden)[:, -1])


class Classifier(nn.Module):
    """An LSTM over tokens, as textbooks write it."""

    def __init__(self, vocabulary: int = 30, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.fc = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embedding(tokens))
        return self.fc(hidden[-1])


# --- samples


def images(count: int, seed: int = 0, side: int = 8) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(1, side, side, generator=generator), number % 3) for number in range(count)]


def tokens(count: int, seed: int = 0, classes: int = 3) -> Samples:
    return [(text["input_ids"], int(text["input_ids"].sum()) % classes) for text, _ in sentences(count, seed)]


def next_tokens(count: int, seed: int = 0) -> Samples:
    """Texts and the token after each, of all of which there are 30."""
    return [*tokens(count - 1, seed, 30), (torch.arange(5), 29)]


#: How a network is made, and a device's samples for it.
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Samples]]] = {
    "resnet-18": (ResNet, images),
    "vit": (VisionTransformer, images),
    "bert": (Encoder, sentences),
    "u-net": (lambda: UNet(classes=3), images),
    "gpt-2": (lambda: GPT2(tied=False), tokens),
    "gpt-2 with tied weights": (lambda: GPT2(tied=True), next_tokens),
    "lstm": (Classifier, tokens),
}
