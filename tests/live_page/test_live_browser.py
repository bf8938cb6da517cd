"""The live page in a real browser, with a real run and a real deployment."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.browser import PHONE, Open, Seen, chromium, hovered, marks_of, zoom
from support.programs import Program, address_of, place
from support.waiting import until

from pipar.live_page.serve import served

pytestmark = pytest.mark.slow

#: Slow links for a small network: an epoch takes about two seconds, and hardly any CPU time.
LINK = {"up": "200kbit/s", "down": "200kbit/s"}


def training(**server: Any) -> dict[str, Any]:
    return {
        "run": {"name": "it", "epochs": 3, "batch_size": 10},
        "model": {"factory": "support.gated:network"},
        "data": {
            "name": "synthetic", "shape": [1, 4, 4], "classes": 10, "samples_per_device": 100, "validation": 10,
            "test": 10,
        },
        "plan": {"split_point": 2, "micro_batches": 2},
        "server": {"cores": 1, "round_deadline": "off", "keepalive": "30s", **server},
        "devices": [{"name": "pi", "count": 2, "link": LINK, "speed": 1.0}],
    }  # fmt: skip


@pytest.fixture(scope="module")
def open_page() -> Iterator[Open]:
    with chromium() as opened:
        yield opened


def page_of(program: Program) -> str:
    return program.says(r"Live page: (http://\S+)")[1]


def texts(seen: Seen, wanted: Mapping[str, int]) -> dict[str, set[str]]:
    """Return different values of numbers of the page, at least as many of each as wanted; fail if they do not change.

    They are looked at together: on a busy machine the run may be over when one after another has changed.
    """
    found: dict[str, set[str]] = {key: set() for key in wanted}

    def has_enough() -> bool:
        for key, values in found.items():
            values.update({seen.page.inner_text(f"[data-live={key}]")} - {"–"})
        return all(len(values) >= wanted[key] for key, values in found.items())

    until(has_enough, f"{wanted} values, not {found}")
    return found


def test_a_page_follows_a_run_without_errors(tmp_path: Path, profiles: Path, open_page: Open) -> None:
    tree = training()
    tree["run"]["epochs"] = 9  # on slow devices: a busy machine may open the page after some of them
    tree["devices"] = [{"name": "pi", "count": 3, "speed": 0.01}]
    with place(tmp_path, profiles, tree) as here:
        run = here.run("run", "run", "train.toml", "--dashboard", "127.0.0.1:0")
        with open_page(page_of(run)) as seen:
            seen.page.wait_for_selector("tr[data-device=pi-1][data-state=training]")
            assert re.fullmatch("[1-8] of 9", seen.page.inner_text("[data-live=epoch]"))
            # The time that is left counts down without messages, so a second value would prove nothing.
            left = texts(seen, {"iteration": 2, "loss": 2, "left": 1})["left"]
            assert all(re.fullmatch(r"0:[0-5]\d", text) for text in left)
            seen.page.locator("[data-live=epoch]", has_text="9 of 9").wait_for()
            # The report may have been made once before the first epoch was over.
            seen.page.wait_for_function("() => window.pipar.charts.has('curve-accuracy')")
            marks = marks_of(seen)
            assert {"lanes-0", "busy-0", "curve-loss", "curve-accuracy"} <= set(marks)
            assert all(marks.values()), marks
            assert seen.violations() == []
            assert run.ends() == 0
            seen.page.wait_for_selector(".live-badge[data-phase=over]")
            over_at = time.monotonic()
            can_be_hovered_and_zoomed(seen)
            seen.page.emulate_media(color_scheme="dark")
            seen.page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
            assert seen.violations() == []
            assert seen.run("() => document.documentElement.scrollWidth") <= PHONE[0]
            # Long enough for it to look for a server that is gone.
            seen.page.wait_for_timeout(max(0.0, 1500 - 1000 * (time.monotonic() - over_at)))
            assert (seen.errors, seen.astray) == ([], [])


def can_be_hovered_and_zoomed(seen: Seen) -> None:
    assert hovered(seen, "lanes-0", "u")
    assert zoom(seen, "lanes-0") == (0, 100)
    seen.page.get_by_role("button", name="Zoom in").click()
    assert zoom(seen, "lanes-0") == (25, 75)


def test_a_killed_device_is_shown_as_away_within_a_second_and_then_as_back(
    tmp_path: Path, profiles: Path, open_page: Open
) -> None:
    # Without keepalives: only the end of the connection shows that the device is gone.
    tree = training(min_devices=2, resume_window="10min", keepalive="1h")
    with place(tmp_path, profiles, tree) as here:
        server = here.server("--dashboard", "127.0.0.1:0")
        address = address_of(server)
        here.hold("pi-2")
        _, second = here.device("pi-1", address), here.device("pi-2", address)
        with open_page(page_of(server)) as seen:
            here.wait_until_held("pi-2")
            seen.page.wait_for_selector("tr[data-device=pi-2][data-state=training]")
            second.kill()  # its system ends the connection immediately
            seen.page.wait_for_selector("tr[data-device=pi-2][data-state=away]")
            server.says("pi-2 lost its connection")
            assert "pi-2 is away" in seen.page.inner_text(".live-said")
            assert "may reconnect for" in seen.page.inner_text("tr[data-device=pi-2] .live-note")
            assert seen.page.get_attribute("tr[data-device=pi-1]", "data-state") == "training"
            here.hold("pi-1")  # so that the training cannot be over before it is looked at
            here.let_go("pi-2")
            here.device("pi-2", address)
            seen.page.wait_for_selector("tr[data-device=pi-2]:is([data-state=joined], [data-state=training])")
            here.let_go("pi-1")
            server.signal(signal.SIGTERM)
            seen.page.wait_for_selector(".live-badge[data-phase=stopped]")
            assert server.ends() == 0
            assert (seen.errors, seen.astray) == ([], [])


def test_a_page_with_a_silent_connection_reconnects(open_page: Open) -> None:
    with served("127.0.0.1:0") as dashboard, open_page(dashboard.url) as seen:
        asked: list[str] = []
        seen.page.on("request", lambda request: asked.append(request.url))
        seen.page.clock.install()
        seen.page.reload()
        seen.page.locator(".live-link", has_text="Connected").wait_for()
        before = sum(url.endswith("/events") for url in asked)
        seen.page.clock.fast_forward(30_000)
        assert sum(url.endswith("/events") for url in asked) == before, "the server speaks every ten seconds only"
        with seen.page.expect_request("**/events"):
            seen.page.clock.fast_forward(60_000)
        seen.page.locator(".live-link", has_text="Connected").wait_for()
