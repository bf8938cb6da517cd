"""Texts for networks that take integers, a tuple or a dictionary, as functions that a configuration can name.

The server of a deployment learns what a sample is from the validation set; `apart` and the like have none.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.gated import Gate
from support.networks import Encoder, sentences

VOCABULARY, LENGTH = 200, 6
SIZES = {"pi-1": 23, "pi-2": 17, "validation": 8, "test": 8}
Samples = Sequence[tuple[Any, Any]] | None


def _apart(samples: Callable[[str], Samples]) -> Callable[[str], Samples]:
    """Return a function of samples that has no held-out sets, as where each machine has its own data only."""
    return lambda name: None if name in ("validation", "test") else samples(name)


# --- a dictionary


def encoder() -> nn.Module:
    """Return a small BERT encoder, which is cut where torch.export shows it."""
    return Encoder()


def messages(name: str) -> Samples:
    """Return tokens with a mask, and one of three classes."""
    return sentences(SIZES.get(name, 9), seed=zlib.crc32(name.encode()))


def longer_messages(_: str) -> Samples:
    return sentences(9, length=7)


messages_apart = _apart(messages)


# --- one tensor of integers


class Letters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.letters(tokens) + self.places(torch.arange(tokens.shape[1]))


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1).unsqueeze(1)
        return x + self.second(torch.tanh(self.first(before)))


def predictor() -> nn.Sequential:
    """Return a network that predicts the next token; its second layer and its last one are gates."""
    return nn.Sequential(Letters(), Gate(), Mixing(), nn.Linear(8, VOCABULARY), Gate())


def verses(name: str) -> Samples:
    """Return tokens without padding, of which those of each device are below another number."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    below = {"pi-1": VOCABULARY // 2}.get(name, VOCABULARY)
    return [(torch.randint(0, below, (LENGTH,), generator=draw), None) for _ in range(SIZES.get(name, 9))]


verses_apart = _apart(verses)


def next_token_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


# --- a tuple


class Pair(nn.Module):
    """Takes tokens and two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.numbers, self.head = nn.Embedding(30, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        return self.head(torch.tanh(self.letters(tokens).mean(1) + self.numbers(numbers)))


def pairs(name: str) -> Samples:
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    made = [(torch.randint(0, 30, (4,), generator=draw), torch.randn(2, generator=draw)) for _ in range(9)]
    return [(pair, int(pair[0][0]) % 3) for pair in made]


pairs_apart = _apart(pairs)
