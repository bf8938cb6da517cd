"""What the metrics of the examples are for a model that learned nothing, or next to nothing, of the same test set."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch

from examples import minilm, shakespeare, unet


def mean_of_targets() -> tuple[str, float]:
    """Return R2 of a constant prediction, which is 0 by its definition."""
    return "a constant prediction", 0.0


def best_threshold() -> tuple[str, float]:
    """Return the IoU of calling bright pixels a digit, with the threshold that is best for the test images."""
    images, masks = (torch.stack(part) for part in zip(*unet.images("test"), strict=True))
    bright = [images[:, 0] > step / 100 for step in range(100)]
    found = [float((one & (masks == 1)).sum() / (one | (masks == 1)).sum()) for one in bright]
    return "the best threshold of brightness", max(found)


def unigram() -> tuple[str, float]:
    """Return the perplexity of a model that knows how often each letter occurs, and nothing else."""
    rows = [row for number in range(1, 9) for row, _ in shakespeare.lines(f"role-{number}")]
    # Each once more: a letter may occur in the test set only.
    counts = Counter(torch.cat(rows).tolist() + list(range(len(shakespeare.LETTERS))))
    next_letters = torch.stack([row[1:] for row, _ in shakespeare.lines("test")]).flatten().tolist()
    loss = -sum(math.log(counts[letter] / counts.total()) for letter in next_letters) / len(next_letters)
    return "letters by how often they occur", math.exp(loss)


def all_spam() -> tuple[str, float]:
    """Return the F1 of calling every message spam; that of calling none spam, the more frequent class, is 0."""
    labels = [label for _, label in minilm.messages("test")]
    share = sum(labels) / len(labels)
    return "calling every message spam", 2 * share / (1 + share)


def guess() -> tuple[str, float]:
    """Return the accuracy of guessing one of ten digits."""
    return "guessing one of ten digits", 0.1


BASELINES: dict[str, Callable[[], tuple[str, float]]] = {
    "diabetes": mean_of_targets,
    "unet": best_threshold,
    "shakespeare": unigram,
    "minilm": all_spam,
    "timm_network": guess,
}
