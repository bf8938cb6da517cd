"""Results as people look at them in Python: frames, figures and HTML."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipar.errors import InputError
from pipar.storage.comparison import Comparison
from pipar.storage.result import Result

PLAN = {"split_point": 2, "micro_batches": 3}


def epoch(number: int, **changes: Any) -> dict[str, Any]:
    found = {"epoch": number, "seconds": 2.0 * number, "train_loss": 1.5 / number, "val_loss": None, "samples": 40}
    found |= {"val_accuracy": 0.25 * number, "bytes_up": 1_500_000, "bytes_down": 500_000, "epsilon": None}
    found |= {"server_idle_s": 1.0, "device_idle_s": 0.5, "utilisation": {"server": 0.5}, "device_bytes": {"a": [1, 2]}}
    return {**found, **changes}


def result(method: str = "pipar", epochs: int = 2, **changes: Any) -> Result:
    content = {"method": method, "model": "<i>net</i>", "dataset": "digits", "world": "virtual", "plans": [PLAN] * 2}
    content |= {"replans": [], "epochs": [epoch(number) for number in range(1, epochs + 1)], "test_accuracy": 0.75}
    content |= {"equivalence": "statistical", "equivalence_reasons": ["dropout"], "stopped": None, **changes}
    return Result(Path("runs/a&b"), content)


def untrained(method: str = "pipar") -> Result:
    trained = result(method, world="timing-only", test_accuracy=None)
    epochs = [{**row, "train_loss": None, "val_accuracy": None} for row in trained.epochs]
    return Result(trained.folder, {**trained.content, "epochs": epochs})


class Cells(HTMLParser):
    """The texts of the rows of all tables, and all tags that are open or closed once too often."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:  # noqa: ARG002 - HTMLParser's
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1].append(data)


# --- one run


def test_a_frame_has_a_row_for_each_epoch_and_a_column_for_each_number() -> None:
    frame = result().frame()
    assert frame.index.tolist() == [1, 2]
    assert frame.index.name == "epoch"
    assert frame["train_loss"].tolist() == [1.5, 0.75]
    assert frame["utilisation.server"].tolist() == [0.5, 0.5]
    assert not [name for name in frame.columns if name.startswith("device_bytes")]


def test_a_run_without_epochs_has_an_empty_frame_and_table() -> None:
    assert len(result(epochs=0).frame()) == 0
    assert "No epoch was finished." in result(epochs=0)._repr_html_()


def test_the_html_of_a_run_is_escaped_and_says_what_holds() -> None:
    html = result()._repr_html_()
    assert "&lt;i&gt;net&lt;/i&gt; on digits, pipar, virtual time" in html
    assert Cells(html).rows == [
        ["plan", "P=2 N=3"],
        ["epoch", "3.00 s on average"],
        ["test accuracy", "75.0 % †"],
        ["equivalence", "statistical: dropout"],
        ["folder", "runs/a&b"],
        ["epoch", "seconds", "train loss", "val acc."],
        ["1", "2.00", "1.5000", "0.250"],
        ["2", "4.00", "0.7500", "0.500"],
    ]


def test_metrics_are_in_the_html_and_the_frame() -> None:
    plain = result(test_metrics={"f1": 0.5})
    scored = [{**row, "val_metrics": {"f1": 0.25, "mae": None}} for row in plain.epochs]
    measured = Result(plain.folder, {**plain.content, "epochs": scored})
    rows = Cells(measured._repr_html_()).rows
    assert ["test f1", "0.5000"] in rows
    assert [row[-1] for row in rows[-3:]] == ["val f1", "0.2500", "0.2500"]
    assert measured.frame()["val_metrics.f1"].tolist() == [0.25, 0.25]


def test_html_has_no_colours_of_its_own() -> None:
    html = result()._repr_html_() + Comparison({"fl": result("fl")})._repr_html_()
    assert "#" not in html
    assert "color:" not in html
    assert html.count("background:none") > 4  # a notebook's stripes may not fit


def test_a_long_run_shows_its_last_epochs() -> None:
    html = result(epochs=25)._repr_html_()
    assert "The last 10 of 25 epochs" in html
    assert [row[0] for row in Cells(html).rows[-10:]] == [str(number) for number in range(16, 26)]


def test_a_figure_has_losses_and_accuracy_or_seconds_and_is_shown_once() -> None:
    figure = result().plot()
    assert [axes.get_title() for axes in figure.axes] == ["loss", "validation accuracy"]
    assert [line.get_label() for line in figure.axes[0].lines] == ["training"]
    assert figure._repr_png_()[:4] == b"\x89PNG"
    assert "matplotlib.pyplot" not in sys.modules or figure.number is None  # pyplot would show it again
    assert [axes.get_title() for axes in untrained().plot().axes] == ["seconds per epoch"]


def test_a_figure_of_a_regression_shows_its_metrics() -> None:
    epochs = [{**epoch(number), "val_accuracy": None, "val_metrics": {"r2": 0.1 * number}} for number in (1, 2)]
    figure = Result(Path("runs/a"), {**result().content, "epochs": epochs}).plot()
    assert [axes.get_title() for axes in figure.axes] == ["loss", "validation r2"]
    assert list(figure.axes[1].lines[0].get_ydata()) == [0.1, 0.2]


def test_a_result_prints_as_one_line() -> None:
    trained = "<Result: <i>net</i> on digits, pipar, virtual time, 2 epochs, test accuracy 75.0 % †; runs/a&b/>"
    assert str(result()) == repr(result()) == trained
    regression = result(epochs=1, test_accuracy=None, test_loss=0.51234, test_metrics={"r2": 0.5})
    assert str(regression).endswith("virtual time, one epoch, test loss 0.5123; runs/a&b/>")
    assert (regression.test_metrics, result().test_metrics) == ({"r2": 0.5}, {})


@pytest.mark.parametrize(("method", "library"), [("frame", "pandas"), ("plot", "matplotlib")])
def test_without_its_library_a_view_says_what_to_install(
    method: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipar.extras.find_spec", lambda _: None)
    for looked_at in (result(), Comparison({"fl": result("fl")})):
        with pytest.raises(InputError) as raised:
            getattr(looked_at, method)()
        name = type(looked_at).__name__
        install = "pip install 'pipar[notebook]'."
        assert str(raised.value) == f"{name}.{method}() needs {library}, which is not installed: {install}"


# --- several


def test_a_comparison_is_a_mapping_with_a_row_for_each_method() -> None:
    slow = result("fl", epochs=3, equivalence="exact", equivalence_reasons=[])
    both = Comparison({"pipar": result(), "fl": slow})
    assert (list(both), len(both), both["fl"] is slow, both.base) == (["pipar", "fl"], 2, True, "fl")
    assert [(row["method"], row["speed_up"]) for row in both.rows()] == [("pipar", 4.0 / 3.0), ("fl", 1.0)]
    assert both.frame()["equivalence"].to_dict() == {"pipar": "statistical", "fl": "exact"}
    assert Cells(both._repr_html_()).rows == [
        ["method", "plan", "s/epoch", "vs fl", "test acc.", "MB up", "MB down", "weights"],
        ["pipar", "P=2 N=3", "3.00", "1.33x", "75.0 % †", "1.50", "0.50", "statistical: dropout"],
        ["fl", "P=2 N=3", "4.00", "1.00x", "75.0 %", "1.50", "0.50", "exact"],
    ]


def test_a_comparison_is_drawn_over_time_if_something_was_learned() -> None:
    figure = Comparison({"fl": result("fl"), "pipar": result()}).plot()
    assert [axes.get_title() for axes in figure.axes] == ["seconds per epoch", "validation accuracy"]
    assert [line.get_label() for line in figure.axes[1].lines] == ["fl", "pipar"]
    assert list(figure.axes[1].lines[0].get_xdata()) == [2.0, 6.0]
    assert len(Comparison({"fl": untrained("fl")}).plot().axes) == 1
