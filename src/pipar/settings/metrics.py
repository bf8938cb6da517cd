"""The named metrics: which tasks each fits, and whether higher is better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class MetricInfo:
    """What a metric compares: the classes of positions, or numbers."""

    of: Literal["classes", "numbers"]
    higher_is_better: bool = True


#: With two classes, these are of class 1; with more, the mean over all classes. Accuracy is over all positions.
METRICS: Mapping[str, MetricInfo] = MappingProxyType(
    {
        "accuracy": MetricInfo("classes"),
        "precision": MetricInfo("classes"),
        "recall": MetricInfo("classes"),
        "f1": MetricInfo("classes"),
        "iou": MetricInfo("classes"),
        "auroc": MetricInfo("classes"),
        "average_precision": MetricInfo("classes"),
        "perplexity": MetricInfo("classes", higher_is_better=False),
        "mae": MetricInfo("numbers", higher_is_better=False),
        "mse": MetricInfo("numbers", higher_is_better=False),
        "rmse": MetricInfo("numbers", higher_is_better=False),
        "r2": MetricInfo("numbers"),
    }
)


def is_own(name: str) -> bool:
    """Return True for a user's function, "package.module:function"."""
    return ":" in name


def shown_name(name: str) -> str:
    """Return the name of a metric in results: that of a user's function without its module."""
    return name.rpartition(":")[2]


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError unless all are known metrics or functions, with different names in results."""
    seen: set[str] = set()
    for name in names:
        if not is_own(name) and name not in METRICS:
            raise ValueError(
                f"names {name!r}, which is not a metric; there are {', '.join(METRICS)}, or write a function of your "
                "own as package.module:function"
            )
        if shown_name(name) in seen:
            raise ValueError(f"has {shown_name(name)!r} twice; give each once")
        seen.add(shown_name(name))
