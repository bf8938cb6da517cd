"""An epoch in one line of text, and the numbers in it."""

from __future__ import annotations

from collections.abc import Mapping

from pipar.events import EpochResult
from pipar.units import format_percent

#: Columns of an epoch's line: title and width, at most 80 together.
_COLUMNS = (
    ("epoch", 5),
    ("seconds", 9),
    ("samples/s", 10),
    ("train loss", 11),
    ("val loss", 9),
    ("val acc", 8),
    ("idle s: server", 15),
    ("device", 7),
    ("eff.", 6),
)


#: With noise on updates, epsilon replaces this column: a line has no room for both.
_REPLACEABLE = "samples/s"
_ACCURACY = "val acc"


def epoch_header(*, private: bool = False, metric: str = "") -> str:
    """Return the titles of the columns of `epoch_line`; a metric, if there is one, has that of the accuracy."""
    others = {_REPLACEABLE: "epsilon"} if private else {}
    others |= {_ACCURACY: _shortened(metric, dict(_COLUMNS)[_ACCURACY])} if metric else {}
    return "".join(others.get(title, title).rjust(width) for title, width in _COLUMNS)


def _shortened(metric: str, width: int) -> str:
    title = f"val {metric}"
    return title if len(title) < width else metric if len(metric) < width else f"{metric[: width - 2]}…"


def epoch_line(result: EpochResult) -> str:
    """Return the results of one epoch in one line of at most 80 columns."""
    rate = result.samples / result.seconds if result.seconds else None
    widths = dict(_COLUMNS)
    values = (
        str(result.epoch),
        number_text(result.seconds, 2, widths["seconds"]),
        number_text(*((rate, 1) if result.epsilon is None else (result.epsilon, 4)), widths[_REPLACEABLE]),
        number_text(result.train_loss, 4, widths["train loss"]),
        number_text(result.val_loss, 4, widths["val loss"]),
        _first_metric(result, widths[_ACCURACY]),
        number_text(result.server_idle_s, 2, widths["idle s: server"]),
        number_text(result.device_idle_s, 2, widths["device"]),
        percent(result.efficiency, 0),
    )
    return "".join(value.rjust(width) for value, (_, width) in zip(values, _COLUMNS, strict=True))


def _first_metric(result: EpochResult, width: int) -> str:
    if not result.val_metrics:
        return percent(result.val_accuracy)
    return number_text(next(iter(result.val_metrics.values())), 4, width)


def metrics_text(metrics: Mapping[str, float | None]) -> str:
    """Return metrics with their values, in words."""
    known = (f"{name} {'-' if value is None else format(value, '.4g')}" for name, value in metrics.items())
    return ", ".join(known)


def number_text(value: float | None, digits: int, width: int) -> str:
    """Return a number with up to `digits` decimals; with fewer, or as a power of ten, if `width` is too small."""
    if value is None:
        return "-"
    texts = [*(f"{value:.{kept}f}" for kept in range(digits, -1, -1)), f"{value:.1e}", f"{value:.0e}"]
    return next((text for text in texts if len(text) < width), texts[-1])


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share in per cent; a dash if it is unknown."""
    return "-" if share is None else f"{format_percent(share, digits)} %"
