"""Networks that are no nn.Sequential: skips in place, skips over every cut, attention, recurrence, shared weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Makes a normalisation of some width.
Norm = Callable[[int], nn.Module]


class Reversed(torch.autograd.Function):
    """The identity, whose gradient has the other sign."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


class Block(nn.Module):
    """A residual block that adds and rectifies in place."""

    def __init__(self, width: int, norm: Norm | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, width) if norm is None else norm(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv2(self.relu(self.norm(self.conv1(x))))
        out += x
        return self.relu(out)


class Residual(nn.Module):
    def __init__(self, width: int = 4, norm: Norm | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Block(width, norm), Block(width, norm))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.stem(x)))
        return self.head(self.dropout(self.layer1(x).mean((2, 3))))


class UNet(nn.Module):
    """Two skips cross every cut between the way down and the way up."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 5, 3, padding=1)
        self.bottom = nn.Conv2d(5, 5, 1)
        self.up2, self.up1 = nn.Conv2d(10, 3, 3, padding=1), nn.Conv2d(6, 2, 3, padding=1)
        self.head = nn.Linear(2, classes)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.down1(x))
        second = F.relu(self.down2(F.max_pool2d(first, 2)))
        low = F.interpolate(self.bottom(F.max_pool2d(second, 2)), size=second.shape[2:])
        middle = F.relu(self.up2(torch.cat([low, second], 1)))
        high = self.up1(torch.cat([F.interpolate(middle, size=first.shape[2:]), first], 1))
        return self.head(high.mean((2, 3)))


class Attention(nn.Module):
    """A transformer over the rows of an image, with learned positions and a mask that depends on the input."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.position = nn.Parameter(torch.randn(1, 4, width) / 10)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4).reshape(1, 4, 1), persistent=False)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.squeeze(1)
        mask = (rows.sum(-1) > 0).unsqueeze(1).expand(-1, 4, -1) | torch.eye(4, dtype=torch.bool)
        tokens = self.embed(rows) * self.scale + self.position
        normed = self.norm1(tokens)
        tokens = tokens + F.scaled_dot_product_attention(
            self.query(normed), self.key(normed), self.value(normed), attn_mask=mask
        )
        tokens = tokens + self.mlp(self.norm2(tokens)) * self.scale
        return self.head(tokens.mean(1))


class Encoder(nn.Module):
    """A BERT encoder: tokens and a mask in a dictionary, positions, and an additive mask as transformers makes it."""

    def __init__(self, vocabulary: int = 30, width: int = 8, heads: int = 2, layers: int = 2, classes: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.norm(self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1])))
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        added = (1.0 - mask[:, None, None, :].to(hidden.dtype)) * torch.finfo(hidden.dtype).min
        for layer in self.layers:
            hidden = layer(hidden, added)
        return self.head(torch.tanh(self.pooler(hidden[:, 0])))


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor, added: Tensor) -> Tensor:
        query, key, value = (self._in_heads(part(hidden)) for part in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5 + added
        seen = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        hidden = self.norm1(hidden + self.out(seen))
        return self.norm2(hidden + self.down(F.gelu(self.up(hidden))))

    def _in_heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def sentences(count: int, seed: int = 0, length: int = 5) -> list[tuple[dict[str, Tensor], int]]:
    """Return samples for an `Encoder`: tokens, of which some at the end are padding that the mask hides."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        tokens = torch.randint(1, 30, (length,), generator=generator)
        used = int(torch.randint(2, length + 1, (), generator=generator))
        mask = (torch.arange(length) < used).long()
        made.append(({"input_ids": tokens * mask, "attention_mask": mask}, int(tokens[0]) % 3))
    return made


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(torch.tanh(self.embed(x.squeeze(1))))
        return self.head(states[:, -1])


class Tied(nn.Module):
    """The first and the last but one layer have one weight; between them it cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 12), nn.Linear(12, 12), nn.Linear(12, 16)
        self.last.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
        self.decoder = nn.Linear(16, 12)
        self.decoder.weight = self.first.weight
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.flatten(1)))
        hidden = torch.tanh(self.last(torch.tanh(self.middle(hidden))))
        return self.head(torch.tanh(self.decoder(hidden)))


class Branching(nn.Module):
    """Its way depends on the values that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 10), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return self.one(flat) if flat.sum() > 0 else self.two(flat)


class Chosen(nn.Module):
    """Modules one after another. What the middle one does to a sample depends on its values: no recording can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh())
        self.body = ChoosesByValue()
        self.output = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.body(self.stem(x)))


class ChoosesByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.one(row) if row.detach().sum().item() > 0 else self.two(row) for row in x])


class Guarded(nn.Module):
    """A table of positions, and weights of the rows, in blocks of torch.no_grad, as rotary embeddings have."""

    def __init__(self, *, spectral: bool = False) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 10)
        self.register_buffer("rates", torch.linspace(0.1, 1.0, 8), persistent=False)
        if spectral:  # it updates buffers in a block of torch.no_grad
            self.mix = nn.utils.parametrizations.spectral_norm(self.mix)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            table = torch.outer(torch.arange(4).to(x.dtype), self.rates).cos()
        rows = self.embed(x.squeeze(1)) * table
        with torch.no_grad():
            share = torch.softmax(rows.sum(-1, keepdim=True), 1)
        return self.head((torch.relu(self.mix(rows)) * share).sum(1))


class Applied(nn.Module):
    """Any function as a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Any:
        return self.function(*given)


class Keeping(nn.Module):
    """Keeps what it is given in a dictionary, which other layers may share."""

    def __init__(self, shared: dict[str, Tensor]) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        self.shared["kept"] = x
        return x


class Restoring(nn.Module):
    """Adds what another layer has kept, if any."""

    def __init__(self, shared: dict[str, Tensor]) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shared["kept"] if "kept" in self.shared else x
