"""The system's Chromium for tests of pages; a page's errors and foreign requests are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.waiting import PATIENCE_S, until

CHROMIUM = Path("/usr/bin/chromium")
DESKTOP, PHONE = (1280, 900), (390, 844)
#: As root in a container, without a sandbox, a screen or much shared memory.
_ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"]


@dataclass
class Seen:
    """An open page, with its errors and foreign requests."""

    page: Any
    errors: list[str] = field(default_factory=list)  # on the console, or uncaught
    astray: list[str] = field(default_factory=list)  # requests to other addresses, which are refused

    def run(self, script: str, *arguments: Any) -> Any:
        """Return the value of a JavaScript function, as in run("(a) => a + 1", 2)."""
        return self.page.evaluate(script, *arguments)

    def violations(self) -> list[str]:
        """Return the serious and critical accessibility violations that axe-core finds."""
        axe = pytest.importorskip(
            "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
        )
        found = axe.Axe().run(self.page).response["violations"]
        return [
            f"{rule['id']}: {node['html'][:200]} {node.get('failureSummary', '')}"
            for rule in found
            if rule["impact"] in ("serious", "critical")
            for node in rule["nodes"]
        ]


Open = Callable[..., Any]


@contextmanager
def chromium() -> Iterator[Open]:
    """Yield a function that opens pages: with open(url, size=PHONE, dark=True) as seen: ...

    Requests that do not begin with `own` (by default the URL itself) are refused and recorded. Without a browser the
    test is skipped.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}: install the system's chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=_ARGUMENTS)

        @contextmanager
        def opened(
            url: str, *, own: str | None = None, size: tuple[int, int] = DESKTOP, dark: bool = False
        ) -> Iterator[Seen]:
            context = browser.new_context(
                viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light"
            )
            context.set_default_timeout(1000 * PATIENCE_S)
            seen = Seen(context.new_page())

            def let_through(route: Any) -> None:
                asked = route.request.url
                if asked.startswith((own or url, "data:", "blob:")):
                    route.continue_()
                else:
                    seen.astray.append(asked)
                    route.abort()

            context.route("**/*", let_through)
            seen.page.on("console", lambda said: seen.errors.append(said.text) if said.type == "error" else None)
            seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
            seen.page.goto(url)
            try:
                yield seen
            finally:
                context.close()

        try:
            yield opened
        finally:
            browser.close()


# --- charts


def marks_of(seen: Seen) -> dict[str, int]:
    """Return the number of visible data shapes of each chart, without axes and legends."""
    script = """() => Object.fromEntries([...window.pipar.charts].map(([id, chart]) => {
        let marks = 0;
        for (const view of chart._chartsViews) {
            view.group.traverse((shape) => {
                if (shape.isGroup || shape.type === "text" || shape.ignore || shape.invisible) return;
                const box = shape.getBoundingRect();
                if (Math.max(box.width, box.height) > 0) marks += 1;
            });
        }
        return [id, marks];
    }))"""
    marks: dict[str, int] = seen.run(script)
    return marks


def hovered(seen: Seen, figure: str, kind: str) -> str:
    """Return what a chart of lanes says about the longest block of a kind, with the mouse over its middle."""
    words = seen.page.locator(f"#{figure} .chart").get_by_text("lasts")

    def says() -> str:
        # A chart finds a block under the mouse only when the mouse moves, and after the block was painted.
        seen.page.mouse.move(0, 0)
        seen.page.mouse.move(*_middle_of(seen, figure, kind), steps=3)
        seen.run("() => new Promise((painted) => requestAnimationFrame(() => requestAnimationFrame(painted)))")
        return str(words.inner_text()) if words.is_visible() else ""

    text: str = until(says, f"{figure} to describe a block of {kind}")
    return text


def _middle_of(seen: Seen, figure: str, kind: str) -> tuple[float, float]:
    """Return the middle of the longest block of a kind, on the screen."""
    script = """([id, kind]) => {
        const chart = window.pipar.charts.get(id);
        const box = chart.getDom();
        box.scrollIntoView({ block: "center" });
        const run = window.pipar.state.content.runs[Number(id.split("-")[1])];
        const shown = run.timeline[window.pipar.state.view];
        const span = shown.spans.filter((one) => one[1] === kind && !one[6]).sort((a, b) => b[5] - a[5])[0];
        const middle = (span[4] + span[5] / 2 - shown.start_us) / 1e6;
        const at = chart.convertToPixel({ xAxisIndex: 0, yAxisIndex: 0 }, [middle, span[0]]);
        const corner = box.getBoundingClientRect();
        return [corner.left + at[0], corner.top + at[1]];
    }"""
    x, y = seen.run(script, [figure, kind])
    return x, y


def zoom(seen: Seen, figure: str) -> tuple[float, float]:
    script = (
        "(id) => { const zoom = window.pipar.charts.get(id).getOption().dataZoom[0]; return [zoom.start, zoom.end]; }"
    )
    start, end = seen.run(script, figure)
    return start, end
