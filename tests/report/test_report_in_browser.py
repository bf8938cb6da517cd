"""The page of a comparison in a browser, from a file: charts, hover, zoom, dark mode, phone, accessibility."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import DESKTOP, PHONE, Open, Seen, chromium, hovered, marks_of, zoom
from support.small_runs import SETTINGS

import pipar
from pipar.monitoring.epoch_lines import percent
from pipar.report import write_comparison

pytestmark = pytest.mark.slow

METHODS = ("fl", "sfl", "pipar")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The folders of three small trainings with mathematics, by method."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPAR_RUNS", str(tmp_path_factory.mktemp("runs")))
        settings = [*SETTINGS, "data.samples_per_device=120", "run.batch_size=40", "devices.count=2"]
        results = pipar.compare(methods=METHODS, world="virtual", settings=settings, report=True)
        yield {method: result.folder for method, result in results.items()}


@pytest.fixture(scope="module")
def url(compared: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    return write_comparison(list(compared.values()), path).as_uri()


@pytest.fixture(scope="module")
def opened() -> Iterator[Open]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def desktop(opened: Open, url: str) -> Iterator[Seen]:
    with opened(url) as seen:
        yield seen


def test_every_chart_has_marks(desktop: Seen) -> None:
    marks = marks_of(desktop)
    expected = {"lanes-0", "lanes-1", "lanes-2", "busy-0", "busy-1", "busy-2", "curve-loss", "curve-accuracy"}
    assert set(marks) == expected | {"cost-time", "cost-bytes"}
    content = desktop.run("() => window.pipar.state.content")
    for place, run in enumerate(content["runs"]):
        blocks = [span for span in run["timeline"]["iteration"]["spans"] if not span[6] and span[5] > 0]
        assert marks[f"lanes-{place}"] >= len(blocks)
    # Two epochs by three methods: their seconds, bytes up and down and curves; of each, four lanes.
    assert all(count >= 6 for count in marks.values()), marks


def test_a_chart_without_data_has_no_marks(desktop: Seen) -> None:
    gone = "() => { const chart = window.pipar.charts.get('cost-time'); chart.setOption({ series: %s }); }"
    empty = "chart.getOption().series.map(() => ({ data: [] }))"
    try:
        desktop.run(gone % empty)
        assert marks_of(desktop)["cost-time"] == 0
    finally:
        desktop.run("() => window.pipar.draw(window.pipar.state.content)")


def test_hovering_a_block_shows_its_details(desktop: Seen) -> None:
    said = hovered(desktop, "lanes-2", "u")
    for part in ("activations up", "uplink", "micro-batch", "starts at", "lasts"):
        assert part in said


def test_buttons_and_the_wheel_zoom_all_timelines(desktop: Seen) -> None:
    assert zoom(desktop, "lanes-2") == (0, 100)
    desktop.page.get_by_role("button", name="Zoom in").click()
    assert zoom(desktop, "lanes-2") == zoom(desktop, "lanes-0") == (25, 75)
    desktop.page.locator("#lanes-2 .chart").hover()
    desktop.page.keyboard.down("Control")
    desktop.page.mouse.wheel(0, -200)
    script = "() => { const zoom = window.pipar.state.zoom; return zoom.end - zoom.start < 49; }"
    desktop.page.wait_for_function(script)
    desktop.page.keyboard.up("Control")
    assert zoom(desktop, "lanes-0") == pytest.approx(zoom(desktop, "lanes-2"))
    kept = zoom(desktop, "lanes-2")
    desktop.run("() => window.pipar.draw(window.pipar.state.content)")
    assert zoom(desktop, "lanes-2") == pytest.approx(kept), "drawing again forgets the zoom"
    desktop.page.get_by_role("button", name="All").click()
    assert zoom(desktop, "lanes-2") == (0, 100)


def test_the_blocks_drawn_are_the_spans_of_trace_json(desktop: Seen, compared: dict[str, Path]) -> None:
    for view in ("epoch", "iteration"):
        desktop.page.locator(f"#view-{view}").check()
        for place, method in enumerate(METHODS):
            script = """(id) => {
                const option = window.pipar.charts.get(id).getOption();
                return [option.series[0].data, option.yAxis[0].data];
            }"""
            blocks, names = desktop.run(script, f"lanes-{place}")
            content = json.loads(desktop.page.locator("#content").text_content())
            shown = content["runs"][place]["timeline"][view]
            start, end = shown["start_us"], shown["end_us"]
            drawn = {(names[row], *(round(at * 1e6 + start) for at in times)) for row, *times, _ in blocks}
            known = {
                span
                for span in _spans(compared[method])
                if span[0] in names and span[1] < end - 2 and span[2] > start + 2
            }
            assert drawn == known


def _spans(folder: Path) -> set[tuple[str, int, int]]:
    """Return the spans of trace.json by the name of their row, to the microsecond."""
    events: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]
    owners = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    words = {"io": "load/code"}
    found = set()
    for event in events:
        if event["ph"] == "X":
            lane = lanes[event["pid"], event["tid"]]
            row = f"{owners[event['pid']]} {words.get(lane, lane)}"
            found.add((row, round(event["ts"]), round(event["ts"] + event["dur"])))
    return found


def test_the_page_fits_a_phone_in_dark_mode(opened: Open, url: str) -> None:
    for size, dark in ((PHONE, False), (DESKTOP, True)):
        with opened(url, size=size, dark=dark) as seen:
            assert seen.run("() => document.documentElement.scrollWidth") <= size[0]
            ground = seen.run("() => getComputedStyle(document.body).backgroundColor")
            red = int(ground.removeprefix("rgb(").split(",")[0])
            assert (red < 60) == dark
            assert (seen.errors, seen.astray) == ([], [])
            assert seen.violations() == []


def test_charts_are_redrawn_for_dark_mode_and_for_printing(opened: Open, url: str) -> None:
    with opened(url) as seen:
        ink = "() => window.pipar.charts.get('cost-time').getOption().textStyle.color"
        light = seen.run(ink)
        seen.page.emulate_media(color_scheme="dark")
        seen.page.wait_for_function(f"(light) => ({ink})() !== light", arg=light)
        dark = seen.run(ink)
        seen.run("() => window.dispatchEvent(new Event('beforeprint'))")
        assert seen.run(ink) == "#000000", "white words on white paper"
        assert seen.run("() => window.pipar.charts.get('lanes-0').getWidth()") <= 700, "wider than the paper"
        slider = "() => window.pipar.charts.get('lanes-0').getOption().dataZoom[1].show"
        assert not seen.run(slider), "paper has no slider"
        seen.run("() => window.dispatchEvent(new Event('afterprint'))")
        assert seen.run(ink) == dark
        assert seen.run(slider)


def test_on_a_phone_the_predictions_are_visible_without_scrolling_the_table(opened: Open, url: str) -> None:
    script = """() => [...document.querySelectorAll(".plan table")].map((table) => Math.max(
        ...[...table.querySelectorAll("caption > span, .number")].map((box) => box.getBoundingClientRect().right)))"""
    with opened(url, size=PHONE) as seen:
        rights = seen.run(script)
    assert len(rights) == len(METHODS)
    assert max(rights) <= PHONE[0]


@pytest.mark.parametrize(
    ("accuracies", "losses"),
    [([0.205, 0.215], [2.3011, 2.3014]), ([0.5, 0.5], [0.7, 0.7]), ([0.4], [1.5]), ([0.1, 0.9], [2.3, 0.01])],
)
def test_no_two_ticks_of_a_curve_have_the_same_label(
    desktop: Seen, accuracies: list[float], losses: list[float]
) -> None:
    script = """([accuracies, losses]) => {
        const before = [window.pipar.state.content, window.pipar.state.against];
        const content = structuredClone(before[0]);
        for (const run of content.runs) {
            run.epochs.length = accuracies.length;
            run.epochs.forEach((epoch, at) => {
                epoch.val_accuracy = accuracies[at];
                epoch.train_loss = epoch.val_loss = losses[at];
            });
        }
        window.pipar.state.against = "epoch";
        window.pipar.draw(content);
        const axis = (id, kind) => window.pipar.charts.get(id).getModel().getComponent(kind).axis;
        const words = (id, kind) => axis(id, kind).getViewLabels().map((label) => label.formattedLabel);
        const ticks = ["curve-accuracy", "curve-loss"].flatMap((id) => [words(id, "xAxis"), words(id, "yAxis")]);
        window.pipar.state.against = before[1];
        window.pipar.draw(before[0]);
        return ticks;
    }"""
    for words in desktop.run(script, [accuracies, losses]):
        assert len(words) >= 2
        assert len(set(words)) == len(words), words
    assert desktop.run(script, [accuracies, losses])[0] == ["1", "2"], "there is no half of an epoch"


def test_an_unknown_idle_time_is_not_shown_as_zero(desktop: Seen) -> None:
    script = """() => {
        const before = window.pipar.state.content;
        const content = structuredClone(before);
        for (const run of content.runs) run.server_idle_s = run.device_idle_s = null;
        window.pipar.draw(content);
        const cards = [...document.querySelectorAll("#cards .card")].map((card) => card.textContent);
        window.pipar.draw(before);
        return cards;
    }"""
    cards = [text for text in desktop.run(script) if " idle" in text]
    assert len(cards) == 2
    assert all(text.startswith("–") for text in cards)


def test_the_accuracy_of_a_statistical_run_is_marked_with_its_reasons(desktop: Seen) -> None:
    script = """() => {
        const before = window.pipar.state.content;
        const content = structuredClone(before);
        const run = content.runs.find((one) => one.method === "pipar");
        [run.mark, run.equivalence, run.whole] = [" †", "statistical: batch statistics", "the whole network"];
        window.pipar.draw(content);
        const texts = (where) => [...document.querySelectorAll(where)].map((one) => one.textContent);
        const rows = texts("#comparison tbody tr");
        const seen = [texts("#cards .card"), rows, texts("#comparison .note"), texts("#plans p")];
        window.pipar.draw(before);
        return seen;
    }"""
    cards, rows, notes, plans = desktop.run(script)
    assert any(" % †" in text and "† statistical: batch statistics" in text for text in cards)
    assert [" % †" in text for text in rows] == [False, False, True]
    assert notes == [
        "† pipar: weights are statistical: batch statistics; the accuracy may differ from that of exact training."
    ]
    assert "The whole network." in plans


def test_percentages_are_rounded_as_in_the_terminal(desktop: Seen) -> None:
    accuracies = [0.5925, 0.59251, 0.5935, 0.28125]
    script = f"""() => {{
        const before = window.pipar.state.content;
        const cards = {accuracies}.map((accuracy) => {{
            const content = structuredClone(before);
            for (const run of content.runs) run.test_accuracy = accuracy;
            window.pipar.draw(content);
            return [...document.querySelectorAll("#cards .card")].map((card) => card.textContent);
        }});
        window.pipar.draw(before);
        return cards;
    }}"""
    shown = [text for cards in desktop.run(script) for text in cards if "test accuracy" in text]
    assert [text.partition("test")[0] for text in shown] == [percent(accuracy) for accuracy in accuracies]


def test_the_change_with_the_largest_gain_is_named(desktop: Seen) -> None:
    runs = desktop.run("() => window.pipar.state.content.runs")
    changes = next(run["outlook"] for run in runs if run["method"] == "pipar")["changes"]
    best = min(changes, key=lambda one: one["epoch_s"])["change"]
    assert f"The largest gain: {best}, −" in desktop.page.locator("#plans .plan .most").last.inner_text()


def test_the_page_is_accessible_and_requests_nothing(desktop: Seen) -> None:
    assert desktop.violations() == []
    assert (desktop.errors, desktop.astray) == ([], [])
    labels = desktop.run("() => [...document.querySelectorAll('.chart')].map((box) => box.getAttribute('aria-label'))")
    assert len(labels) == 10
    assert all(label and len(label) > 30 for label in labels)
