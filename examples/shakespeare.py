"""A small transformer learns to write like Shakespeare, letter by letter: each role is a device with its own lines.

    pipar compare examples/shakespeare.toml --methods fl,pipar --virtual

The text is Tiny Shakespeare: put its file `input.txt` into the folder `tinyshakespeare` of PIPAR_DATA. The page
docs/examples/shakespeare.md has what was measured.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from string import ascii_letters

import torch
from torch import Tensor, nn

from pipar.data.catalog import data_folder

LETTERS = "\n !$&',-.3:;?" + ascii_letters  # all that occur
LENGTH = 64  # letters of a sample
SAMPLES = 256  # of a role, at most; it is tested on later lines
#: To try things out without the file.
EXCERPT = """ROMEO:
But, soft! what light through yonder window breaks? It is the east, and Juliet is the sun. Arise, fair sun, and kill the
envious moon, who is already sick and pale with grief, that thou her maid art far more fair than she.

JULIET:
O Romeo, Romeo! wherefore art thou Romeo? Deny thy father and refuse thy name; or, if thou wilt not, be but sworn my
love, and I'll no longer be a Capulet. 'Tis but thy name that is my enemy; thou art thyself, though not a Montague.
"""


class Block(nn.Module):
    """Attention to the letters before, and two linear layers for each letter."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        # No bias: that of the keys has no effect on the output, and Adam would follow the rounding of its gradient.
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self._attention(self.before_attention(x)))
        return x + self.mlp(x)

    def _attention(self, x: Tensor) -> Tensor:
        # (samples, letters, width) to three tensors of (samples, heads, letters, width of a head)
        q, k, v = self.queries_keys_values(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).flatten(2)


class Writer(nn.Module):
    """Gives logits of the next letter for each letter of a text."""

    def __init__(self, *, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, letters: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.letters(letters) + self.positions)))


def network() -> nn.Module:
    """Return the network of the example: 3 blocks of width 64, 0.2 million parameters."""
    return Writer()


def tiny() -> nn.Module:
    """Return one that is trained in a second, to try things out."""
    return Writer(width=16, depth=2)


def lines(name: str) -> list[tuple[Tensor, None]]:
    """Return the letters of "role-1", who has the longest part, "role-2" and so on; the target is the next letter.

    The last tenth of what each of the first eight roles says is for validation and test.
    """
    return _samples(_part(name))


def excerpt(name: str) -> list[tuple[Tensor, None]]:
    """Return letters of a few lines, which are in this file: those of Juliet for role-2, those of Romeo otherwise."""
    return _samples(list(_roles(EXCERPT).values())[name == "role-2"])


def _samples(text: str) -> list[tuple[Tensor, None]]:
    tokens = torch.tensor([LETTERS.index(letter) for letter in text[: SAMPLES * LENGTH]])
    return [(row, None) for row in tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)]


def _part(name: str) -> str:
    """Return what a device or a held-out set has: 18 of 20 parts of what a role says, then one, then one."""
    parts = _parts()
    if name == "validation":
        return "".join(part[len(part) * 18 // 20 : len(part) * 19 // 20] for part in parts[:8])
    if name == "test":
        return "".join(part[len(part) * 19 // 20 :] for part in parts[:8])
    part = parts[int(name.rpartition("-")[2]) - 1]
    return part[: len(part) * 18 // 20]


@cache
def _parts() -> list[str]:
    """Return what each role says, the longest part first."""
    path = data_folder() / "tinyshakespeare" / "input.txt"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: put Tiny Shakespeare there, or set PIPAR_DATA")
    return sorted(_roles(path.read_text("utf-8")).values(), key=len, reverse=True)


def _roles(text: str) -> dict[str, str]:
    """Return what each role says: after an empty line, a line with its name and a colon begins a speech."""
    said: defaultdict[str, str] = defaultdict(str)
    role = ""
    for speech in re.split(r"\n\n+", text):
        if found := re.match(r"([^\n]+):(?:\n|$)", speech):
            role, speech = found[1], speech[found.end() :]
        said[role] += speech.strip() + "\n"
    return dict(said)
