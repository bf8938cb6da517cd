"""The results of several methods with the same configuration, as Python programs read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pipar.html_table import html_line, html_page, html_rows
from pipar.settings.wording import equivalence_text, statistical_mark
from pipar.storage import result_views
from pipar.storage.result import Result

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Comparison(Mapping[str, Result]):
    """The results of several methods, by method; a notebook shows it as a table.

    >>> both = pipar.compare(methods=["fl", "pipar"], world="timing-only", settings=SMALL)
    >>> list(both)
    ['fl', 'pipar']
    >>> both["fl"].content["plans"][0]["micro_batches"]
    1
    """

    results: Mapping[str, Result]

    def __getitem__(self, method: str) -> Result:
        return self.results[method]

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    @property
    def base(self) -> str:
        """The method that the others are compared with: fl, or the first one."""
        return "fl" if "fl" in self.results else next(iter(self.results))

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each method: means over its epochs, and its test accuracy.

        >>> pipar.compare(methods=["fl", "pipar"], world="timing-only", settings=SMALL).rows()[0]["speed_up"]
        1.0
        """
        base_s = self.results[self.base].seconds_per_epoch
        return [{"method": method, **_row(result, base_s)} for method, result in self.results.items()]

    def frame(self) -> pandas.DataFrame:
        """Return the rows as a DataFrame of pandas, with the methods as its index.

        >>> pipar.compare(methods=["fl", "pipar"], world="timing-only", settings=SMALL).frame().index.tolist()
        ['fl', 'pipar']
        """
        return result_views.frame(self.rows(), "method", "Comparison.frame()")

    def plot(self) -> Figure:
        """Return a figure of matplotlib: seconds of an epoch, and how the accuracy or the loss changes over time.

        >>> figure = pipar.compare(methods=["fl", "pipar"], world="timing-only", settings=SMALL).plot()
        >>> len(figure.axes)  # a timing-only run learns nothing
        1
        """
        return _plot(self.results)  # type: ignore[no-any-return]

    def _repr_html_(self) -> str:
        first = next(iter(self.results.values())).content
        what = result_views.subject(first["model"], first["dataset"])
        title = f"{what}, {result_views.WORLDS[first['world']]}"
        shown = [_html_row(row, self.results[row["method"]]) for row in self.rows()]
        heads = ["method", "plan", "s/epoch", f"vs {self.base}", "test acc.", "MB up", "MB down", "weights"]
        return html_page(title, html_rows(heads, shown), html_line(_note(len(first["epochs"]))))


def _note(epochs: int) -> str:
    return "One epoch" if epochs == 1 else f"Mean of {epochs} epochs"


def _row(result: Result, base_s: float) -> dict[str, Any]:
    seconds = result.seconds_per_epoch
    means = {key: _mean(result, key) for key in ("server_idle_s", "device_idle_s", "bytes_up", "bytes_down")}
    return {
        "seconds": seconds,
        "speed_up": base_s / seconds if seconds else None,
        **means,
        "test_accuracy": result.test_accuracy,
        "epsilon": result.content.get("epsilon"),
        "equivalence": result.content["equivalence"],
        "folder": str(result.folder),
    }


def _mean(result: Result, key: str) -> float:
    return sum(float(epoch[key]) for epoch in result.epochs) / len(result.epochs)


def _html_row(row: Mapping[str, Any], result: Result) -> list[str]:
    speed_up = row["speed_up"]
    return [
        row["method"],
        result_views.plans(result.content),
        result_views.number(row["seconds"], 2),
        "-" if speed_up is None else f"{speed_up:.2f}x",
        f"{result_views.percent(row['test_accuracy'])}{statistical_mark(result.content)}",
        result_views.number(row["bytes_up"] / 1e6, 2),
        result_views.number(row["bytes_down"] / 1e6, 2),
        equivalence_text(result.content) or "-",
    ]


def _plot(results: Mapping[str, Result]) -> Any:
    every = [epoch for result in results.values() for epoch in result.epochs]
    names = {"val_accuracy": "validation accuracy", "train_loss": "training loss"}
    key = next((key for key in names if any(epoch.get(key) is not None for epoch in every)), None)
    figure, axes = result_views.new_figure("Comparison.plot()", 1 if key is None else 2)
    bars = axes[0].bar(list(results), [result.seconds_per_epoch for result in results.values()])
    axes[0].bar_label(bars, fmt="%.2f")
    axes[0].margins(y=0.12)  # for the label of the highest bar
    axes[0].set_title("seconds per epoch", fontsize="medium")
    if key is not None:
        for method, result in results.items():
            ends_s = list(accumulate(float(epoch["seconds"]) for epoch in result.epochs))
            result_views.curve(axes[1], ends_s, result.epochs, {key: method}, names[key])
        axes[1].set_xlabel("seconds")
        axes[1].legend(frameon=False)
    return figure
