"""Every figure has the marks of its rows, and the same rows give the same file."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from pipar.errors import InputError
from reproduction.drawing import LOOKS, check_matplotlib, distinct, name_of, short, styled
from reproduction.plots import FIGURES, by_method, figures_of, plot, plot_if_possible
from reproduction.published import published
from reproduction.testbed import SERVER_SPEED

LINKS = ("4g", "4g+", "wifi")
METHODS = ("fl", "sfl", "pipar")
Rows = list[dict[str, Any]]
HALF = "FL/2: half of the time of FL"

pytestmark = pytest.mark.slow  # matplotlib takes a second to import


@pytest.fixture(autouse=True)
def _matplotlib() -> Iterator[None]:
    """Draw as `plot` does; skip where figures cannot be drawn."""
    pytest.importorskip("matplotlib")
    with styled():
        yield


def seconds(network: str, link: str, method: str) -> float:
    """Seconds that are different for everything."""
    return 10.0 * (1 + LINKS.index(link)) + METHODS.index(method) + len(network) / 100


def time_rows(*networks: str, data: str = "cifar10") -> Rows:
    return [
        {"network": network, "data": data, "link": link, "method": method, "seconds": seconds(network, link, method)}
        for network, link, method in product(networks, LINKS, METHODS)
    ]


def accuracy_rows() -> Rows:
    of_seeds = {"fl": [90.0, 91.0, 92.0], "sfl": [90.0, 91.0, 92.0], "pipar": [90.5, 91.5, 91.0]}
    means = {method: sum(percent) / len(percent) for method, percent in of_seeds.items()}
    return [
        {"network": network, "data": data, **means, "of_seeds": of_seeds}
        for network, data in (("vgg5", "mnist"), ("mobilenetv3_small", "mnist"), ("vgg5", "cifar10"))
    ]


def draw(name: str, rows: Rows) -> Any:
    return FIGURES[name][0](rows)


def shown(figure: Any) -> list[Any]:
    return [axes for axes in figure.axes if axes.axison]


def heights(axes: Any) -> list[float]:
    return sorted(bar.get_height() for container in axes.containers for bar in container)


def texts(axes: Any) -> set[str]:
    return {text.get_text() for text in axes.texts}


def entries(figure: Any) -> list[str]:
    """Return the text of the legend above the panels."""
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def curves(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


# --- bars


@pytest.mark.slow
def test_times_have_a_bar_for_every_link_and_method_in_a_panel_for_every_network() -> None:
    figure = draw("time", time_rows("resnet18", "vgg5"))
    first, second = shown(figure)
    assert [axes.get_title() for axes in (first, second)] == ["VGG-5 (CIFAR-10)", "ResNet-18 (CIFAR-10)"]
    assert heights(first) == sorted(seconds("vgg5", link, method) for link, method in product(LINKS, METHODS))
    assert [label.get_text() for label in first.get_xticklabels()] == ["4G", "4G+", "WiFi"]
    assert set(entries(figure)) == {"FL", "SFL", "PiPar", HALF, "PiPar, as published (right of its bar)"}


def test_bars_of_a_link_are_side_by_side_and_do_not_overlap() -> None:
    (axes,) = shown(draw("time", time_rows("vgg5")))
    edges = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bars in axes.containers for bar in bars)
    assert len(edges) == len(LINKS) * len(METHODS)
    assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(edges))
    assert all(round(start + 0.1) == round(end - 0.1) for start, end in edges)


def test_a_bar_shows_its_seconds_and_how_much_shorter_than_fl_it_is() -> None:
    (axes,) = shown(draw("time", time_rows("vgg5")))
    assert {"10", "11\nFL/0.9", "12\nFL/0.8"} <= texts(axes)


def test_a_network_that_does_not_fit_has_no_bar_and_ratios_are_then_relative_to_sfl() -> None:
    rows = [row | {"seconds": None} if row["method"] == "fl" else row for row in time_rows("vgg16", data="cifar100")]
    (axes,) = shown(draw("time", rows))
    assert len(heights(axes)) == 6
    assert [text.get_text() for text in axes.texts].count("does not fit") == 3
    assert {"11.1", "12.1\nSFL/0.9"} <= texts(axes)


def test_published_seconds_are_marked_to_the_right_of_pipars_bars_and_hide_no_number() -> None:
    (axes,) = shown(draw("time", time_rows("vgg5")))
    across, up = curves(axes)["PiPar, as published (right of its bar)"]
    printed = [published().selection("vgg5", "cifar10", link) for link in LINKS]
    assert up == [row.epoch_s for row in printed if row is not None]
    bars = list(axes.containers[METHODS.index("pipar")])
    ends = [bar.get_x() + bar.get_width() for bar in bars]
    assert all(end < x < end + 0.1 for end, x in zip(ends, across, strict=True)), "before the next link's bars"
    middles = {(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in bars}
    assert middles <= {text.xy for text in axes.texts}


def test_a_published_mark_far_above_its_bar_is_visible() -> None:
    rows = [row | {"seconds": 1.0} for row in time_rows("vgg16", data="tiny_imagenet")]
    (axes,) = shown(draw("time", rows))
    assert axes.get_ylim()[1] > 455.7


def test_a_network_that_is_not_in_the_paper_is_drawn_without_a_mark() -> None:
    figure = draw("time", time_rows("mine"))
    assert [axes.get_title() for axes in shown(figure)] == ["mine (CIFAR-10)"]
    assert set(entries(figure)) == {"FL", "SFL", "PiPar", HALF}


@pytest.mark.parametrize(
    "other", [{"devices": 10}, {"wire": "auto"}, {"board": "raspberry-pi-5"}, {"server_speed": 9.0}], ids=str
)
def test_published_seconds_are_shown_only_for_epochs_of_the_papers_testbed(other: dict[str, Any]) -> None:
    its = {"devices": 100, "wire": "raw", "board": "raspberry-pi-3b", "server_speed": SERVER_SPEED}
    same, another = (draw("time", [row | its | more for row in time_rows("vgg5")]) for more in ({}, other))
    assert [any("as published" in label for label in entries(figure)) for figure in (same, another)] == [True, False]


def test_bars_begin_at_zero_on_a_linear_axis_even_if_they_differ_much() -> None:
    rows = [row | {"seconds": 1000.0 if row["method"] == "fl" else 1.0} for row in time_rows("vgg5")]
    idle = [row | {"server_idle_s": row["seconds"], "device_idle_s": 1.0} for row in rows]
    for (axes,) in (shown(draw("time", rows)), shown(draw("idle", idle))):
        low, high = axes.get_ylim()
        assert axes.get_yscale() == "linear"
        assert low <= 0 < 1000 < high


def test_idle_times_of_the_server_go_up_and_of_devices_down() -> None:
    rows = [
        {"network": "vgg5", "data": "mnist", "link": "4g", "method": method, "server_idle_s": up, "device_idle_s": down}
        for method, up, down in (("fl", 9.0, 1.0), ("sfl", 6.0, 5.0), ("pipar", 2.0, 0.5))
    ]
    figure = draw("idle", rows)
    (axes,) = shown(figure)
    assert heights(axes) == [-5.0, -1.0, -0.5, 2.0, 6.0, 9.0]
    assert texts(axes) == {"9", "1", "6", "5", "2", "0.5"}
    assert entries(figure) == ["FL", "SFL", "PiPar"]
    figure.canvas.draw()
    assert not any(label.get_text().startswith(("-", "−")) for label in axes.get_yticklabels())


def test_boards_of_two_speeds_are_groups_in_a_panel_for_every_network_and_link() -> None:
    rows = [
        row | {"boards": boards, "seconds": row["seconds"] * factor}
        for boards, factor in (("alike", 1), ("half at half speed", 2))
        for row in time_rows("vgg5", "resnet18")
    ]
    figure = draw("heterogeneous", rows)
    titles = [axes.get_title() for axes in shown(figure)]
    assert titles == [f"{network} ({link})" for network in ("VGG-5", "ResNet-18") for link in ("4G", "4G+", "WiFi")]
    first = shown(figure)[0]
    assert heights(first) == pytest.approx([10.04, 11.04, 12.04, 20.08, 22.08, 24.08])
    assert [label.get_text() for label in first.get_xticklabels()] == ["alike", "half at half speed"]


def test_noise_is_drawn_on_top_of_the_epoch_without_it() -> None:
    rows = [
        {"network": "vgg5", "link": "4g", "method": method, "mechanism": mechanism, "seconds": base + added}
        for method, base in (("fl", 30.0), ("pipar", 20.0))
        for mechanism, added in (("classic", 2.0), ("none", 0.0), ("pixeldp", 0.25))
    ]
    figure = draw("privacy", rows)
    (axes,) = shown(figure)
    on_top = {(bar.get_y(), bar.get_height()) for bars in axes.containers for bar in bars if bar.get_y() > 0}
    assert on_top == {(30.0, 2.0), (30.0, 0.25), (20.0, 2.0), (20.0, 0.25)}
    assert heights(axes)[-3:] == [30.0] * 3
    assert {"+2", "+0.25"} <= texts(axes)
    assert sorted(entries(figure)) == ["+ classic", "+ pixeldp", "FL", "PiPar"]


def test_an_epoch_that_is_shorter_with_noise_has_a_minus_sign() -> None:
    rows = [
        {"network": "vgg5", "link": "4g", "method": "pipar", "mechanism": mechanism, "seconds": seconds}
        for mechanism, seconds in (("none", 20.0), ("pixeldp", 19.5))
    ]
    (axes,) = shown(draw("privacy", rows))
    assert texts(axes) == {"-0.5"}


def test_numbers_and_legend_of_a_narrow_figure_are_inside_and_do_not_overlap() -> None:
    rows = [
        {"network": "vgg5", "link": "4g", "method": method, "mechanism": mechanism, "seconds": 20.0 + added}
        for method in METHODS
        for mechanism, added in (("none", 0.0), ("classic", 0.00115), ("pixeldp", 0.345))
    ]
    figure = draw("privacy", rows)
    figure.canvas.draw()
    (legend,) = figure.legends
    assert figure.bbox.contains(*legend.get_window_extent().min)
    assert figure.bbox.contains(*legend.get_window_extent().max)
    (axes,) = shown(figure)
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.x0)
    assert len(boxes) == 6
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))


# --- lines


def test_losses_are_the_mean_of_the_seeds_with_their_range_behind_it() -> None:
    rows = [
        {
            "network": "vgg5",
            "data": "mnist",
            "method": method,
            "seed": seed,
            "epoch": epoch,
            "val_loss": 4 / epoch + seed,
        }
        for method, seed, epoch in product(METHODS, (0, 2), (2, 1))
    ]
    figure = draw("convergence", rows)
    (axes,) = shown(figure)
    assert curves(axes) == {name: ([1, 2], [5.0, 3.0]) for name in ("FL", "SFL", "PiPar")}
    widths = [line.get_linewidth() for line in axes.get_lines()]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == 3, "curves that overlap must all be visible"
    assert all(float(tick).is_integer() for tick in axes.get_xticks()), "there is no half epoch"
    spans = [band.get_paths()[0].get_extents().intervaly.tolist() for band in axes.collections]
    assert spans == [[2.0, 6.0]] * 3


def test_batch_sizes_are_marked_on_a_logarithmic_axis_one_panel_for_every_link() -> None:
    rows = [row | {"batch_size": size} for size in (250, 25, 100) for row in time_rows("vgg5")]
    figure = draw("batch-size", rows)
    assert [axes.get_title() for axes in shown(figure)] == ["4G", "4G+", "WiFi"]
    first = shown(figure)[0]
    assert curves(first)["PiPar"] == ([25, 100, 250], [12.04] * 3)
    assert first.get_xscale() == "log"
    assert [label.get_text() for label in first.get_xticklabels()] == ["25", "100", "250"]


def test_overheads_are_lines_with_the_papers_values_next_to_them() -> None:
    rows = [
        {"network": network, "minutes": minutes, "overhead_percent": 0.5 / minutes, "devices": 100}
        for network, minutes in product(("vgg5", "mine"), (60, 1, 10))
    ]
    printed, other = shown(draw("bandwidth", rows))
    (of_ten, _) = shown(draw("bandwidth", [row | {"devices": 10} for row in rows]))
    assert list(curves(of_ten)) == ["PiPar"], "the paper's are of 100 devices"
    assert curves(printed)["PiPar"] == ([1, 10, 60], [0.5, 0.05, 0.5 / 60])
    assert curves(printed)["as published (1 min: most of all)"] == ([60, 1], [0.14, 8.3])
    assert list(curves(other)) == ["PiPar"]
    assert (printed.get_xscale(), printed.get_yscale()) == ("log", "log")
    assert printed.get_xlabel() == "minutes between changes, log scale"
    assert printed.get_ylabel() == "overhead (% of training)\nlog scale"


def scale_rows() -> Rows:
    sizes = {"up_GB": 3.0, "down_GB": 4.0, "server_GB": 5.0, "planning_s": 6.0}
    return [
        {**row, "devices": devices, "seconds": 2.0 * devices, **sizes, "is_run": devices < 1000}
        for devices in (10_000, 100, 1)
        for row in time_rows("vgg5")
    ]


def test_scale_has_a_curve_per_method_and_a_panel_per_link_and_quantity() -> None:
    axes = shown(draw("scale", scale_rows()))
    grows = ("epoch", "traffic of an epoch", "server", "planning")
    assert [one.get_title() for one in axes] == [
        f"VGG-5, {what} ({link})" for what, link in product(grows, ("4G", "4G+", "WiFi"))
    ]
    first, traffic = curves(axes[0]), curves(axes[3])
    assert {name: first[name] for name in ("FL", "SFL", "PiPar")} == {
        name: ([1, 100, 10_000], [2.0, 200.0, 20_000.0]) for name in ("FL", "SFL", "PiPar")
    }
    assert traffic["PiPar"] == ([1, 100, 10_000], [7.0] * 3)
    assert (axes[0].get_yscale(), axes[3].get_yscale()) == ("log", "linear")
    drawn = [line for line in axes[0].get_lines() if line.get_label() in ("FL", "SFL", "PiPar")]
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == 3


@pytest.mark.slow
def test_marks_of_rows_that_were_not_run_are_hollow_and_explained_in_the_legend() -> None:
    rows = scale_rows()
    figure = draw("scale", rows)
    hollow = {
        line.get_label(): list(line.get_xdata())
        for line in shown(figure)[0].get_lines()
        if line.get_markerfacecolor() == "white"
    }
    assert hollow.pop("forecast from a sample") == []
    assert list(hollow.values()) == [[10_000]] * 3
    assert "forecast from a sample" in entries(figure)
    assert "forecast from a sample" not in entries(draw("scale", [row for row in rows if row["is_run"]]))
    computed = {"network": "vgg5", "minutes": 60, "overhead_percent": 0.1, "is_run": False}
    bandwidth = draw("bandwidth", [computed, computed | {"minutes": 1, "is_run": True}])
    assert "computed from shorter intervals" in entries(bandwidth)


def test_numbers_below_an_axis_are_left_out_where_they_would_overlap() -> None:
    counts = (1, 10, 100, 110, 1000)
    rows = [row | {"devices": count, "seconds": 1.0} for count in counts for row in time_rows("vgg5")]
    labels = [label.get_text() for label in shown(draw("scale", rows))[0].get_xticklabels()]
    assert labels == ["1", "10", "100", "", "1000"]


# --- maps


def test_a_map_marks_the_chosen_pair_and_the_best_one() -> None:
    rows = [
        {
            "network": "vgg5", "data": "cifar10", "link": "4g", "split_point": p, "micro_batches": n,
            "seconds": 10.0 + abs(p - 2) + abs(n - 4), "chosen": (p, n) == (1, 8),
        }
        for p, n in product((1, 2, 3), (1, 4, 8))
        if (p, n) != (3, 8)
    ]  # fmt: skip
    figure = draw("selection", rows)
    axes = shown(figure)[0]
    assert axes.get_title() == "VGG-5, CIFAR-10 (4G)"
    shown_seconds = axes.get_images()[0].get_array()
    assert shown_seconds.shape == (3, 3)
    assert (shown_seconds[1, 1], shown_seconds[0, 2]) == (10.0, 15.0)
    assert bool(shown_seconds.mask[2, 2]), "a pair that was not tried is not drawn"
    marks = {marks.get_label(): marks.get_offsets().tolist() for marks in axes.collections}
    assert marks == {"best": [[1.0, 1.0]], "chosen": [[2.0, 0.0]]}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "4", "8"]


# --- dots


@pytest.mark.slow
def test_scores_have_a_line_each_with_the_published_one_and_both_thresholds() -> None:
    rows = [
        {"network": "vgg5", "data": "cifar10", "link": link, "score": ours, "its_score": printed}
        for link, ours, printed in (("4g", 0.93, 1.0), ("wifi", 1.0, 0.98))
    ]
    figure = draw("scores", rows)
    (axes,) = shown(figure)
    lines = curves(axes)
    assert lines["PiPar"] == ([0.93, 1.0], [0, 1])
    assert lines["the paper's plans, as published"][0] == [1.0, 0.98]
    assert lines["0.96 lowest, as published"][0] == [0.96, 0.96]
    assert lines["0.98 wanted here"][0] == [0.98, 0.98]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["VGG-5, CIFAR-10, 4G", "VGG-5, CIFAR-10, WiFi"]
    assert axes.get_xlim()[0] < 0.93, "a bad score is seen"


# --- rows, figures and files


def test_methods_side_by_side_become_separate_rows() -> None:
    (fl, pipar) = by_method([{"link": "4g", "fl_s": 3.0, "pipar_s": 1.0, "pipar_server_idle": 0.5}])
    assert (fl["method"], fl["seconds"], fl["link"]) == ("fl", 3.0, "4g")
    assert (pipar["method"], pipar["seconds"], pipar["server_idle_s"]) == ("pipar", 1.0, 0.5)
    assert by_method([fl]) != [fl]  # it still has both side by side
    assert by_method(time_rows("vgg5")) == time_rows("vgg5")


def test_small_networks_large_networks_and_other_testbeds_have_separate_figures() -> None:
    rows = [{"network": network, "devices": count} for network, count in product(("vgg5", "vgg16"), (100, 10))]
    assert [ending for ending, _ in figures_of(rows, ("size", "devices"))] == [
        "-small-100", "-small-10", "-large-100", "-large-10",
    ]  # fmt: skip
    assert [ending for ending, _ in figures_of(rows[:1], ("size", "devices"))] == [""]
    assert figures_of([], ("size",)) == []


def many_rows() -> dict[str, Rows]:
    """Rows that every figure can be drawn from."""
    rows = [
        row | {"batch_size": size, "boards": "alike", "mechanism": "none", "devices": size, "val_loss": size / 50.0,
               "epoch": size, "seed": 0, "minutes": size, "overhead_percent": 1.0, "split_point": 1,
               "micro_batches": size, "server_idle_s": 1.0, "device_idle_s": 30.0, "score": 0.99, "run": "abc"}
        for size in (50, 100)
        for row in time_rows("vgg5")
    ]  # fmt: skip
    once = dict.fromkeys(("time", "idle", "heterogeneous", "privacy"), rows[:9])
    lines = {name: [row for row in rows if row["method"] == "pipar"] for name in ("bandwidth", "selection")}
    return {**dict.fromkeys(FIGURES, rows), **once, **lines, "accuracy": accuracy_rows()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if n else ()) for n, name in enumerate(FIGURES)]
)
def test_the_same_rows_give_the_same_files(name: str, tmp_path: Path) -> None:
    rows = many_rows()[name]
    first, second = plot(name, rows, tmp_path / "a"), plot(name, rows, tmp_path / "b")
    assert {path.suffix for path in first} == {".svg", ".png"}
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    drawn = first[0].read_text("utf-8")
    assert not re.search(r"<dc:date>|\b20\d\d-\d\d-\d\d", drawn), "a date would make every file another one"


@pytest.mark.slow
def test_a_users_own_settings_do_not_change_the_files(tmp_path: Path) -> None:
    import matplotlib

    (before, _) = plot("time", time_rows("vgg5"), tmp_path / "a")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "svg.hashsalt": None}):
        (after, _) = plot("time", time_rows("vgg5"), tmp_path / "b")
    assert before.read_bytes() == after.read_bytes()


def test_without_rows_there_is_no_figure(tmp_path: Path) -> None:
    assert plot("time", [], tmp_path) == []
    assert plot("convergence", [{"network": "vgg5", "data": "mnist", "val_loss": None}], tmp_path) == []


def test_an_unknown_figure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'tmie' is not a figure; choose from time, idle, "):
        plot("tmie", [], tmp_path)


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install 'pipar\[reproduce\]'"):
        check_matplotlib()
    assert plot_if_possible("time", time_rows("vgg5"), Path("nowhere")) == []


# --- looks


def test_methods_differ_in_colour_hatch_and_marker() -> None:
    fields: list[Callable[[Any], str]] = [lambda look: look.colour, lambda look: look.hatch, lambda look: look.marker]
    for field in fields:
        assert len({field(look) for look in LOOKS.values()}) == len(LOOKS)


@pytest.mark.parametrize(("value", "text"), [(1234.5, "1234"), (12.34, "12.3"), (0.01234, "0.0123"), (20.0, "20")])
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert short(value) == text


def test_columns_are_in_the_order_of_the_configuration_and_numbers_by_size() -> None:
    rows = [{"link": link, "n": n} for link, n in (("wifi", 10), ("mine", 9), ("4g", 100), ("wifi", None))]
    assert distinct(rows, "link") == ["4g", "wifi", "mine"]
    assert distinct(rows, "n") == [9, 10, 100]


def test_names_are_the_papers_and_others_stay_unchanged() -> None:
    assert [name_of(key) for key in ("vgg5", "mine", 3, 2.50)] == ["VGG-5", "mine", "3", "2.5"]


def test_every_seed_has_a_mark_next_to_the_mean_of_its_method() -> None:
    found = shown(draw("accuracy", accuracy_rows()))
    assert [axes.get_title() for axes in found] == ["VGG-5 (MNIST)", "MobileNetV3-Small (MNIST)", "VGG-5 (CIFAR-10)"]
    for axes in found:
        assert [list(line.get_ydata()) for line in axes.lines] == list(accuracy_rows()[0]["of_seeds"].values())
        assert texts(axes) == {"91.00"}
