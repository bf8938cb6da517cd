"""The page is one file that loads nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from importlib import resources
from itertools import pairwise
from pathlib import Path

import pytest

from pipar.report import RunRecord, render, write_comparison
from pipar.report.content import content

MOST_BYTES = 3_000_000


class Page(HTMLParser):
    """Collects tags, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def comparison(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    return write_comparison(list(runs.values()), path).read_text("utf-8")


@pytest.mark.slow
def test_a_page_of_four_runs_is_small_and_loads_nothing(comparison: str) -> None:
    assert len(comparison.encode()) < MOST_BYTES
    page = Page(comparison)
    loading = [(tag, attrs) for tag, attrs in page.tags if {"src", "srcset", "action"} & set(attrs)]
    assert loading == []
    assert [attrs["href"] for tag, attrs in page.tags if tag == "link"] == ["data:,"]
    assert not re.search(r"@import|url\(\s*['\"]?(?!#|data:)", re.search(r"<style>(.*?)</style>", comparison, re.S)[1])  # type: ignore[index]
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|EventSource|sendBeacon|importScripts", page.scripts[-1])


@pytest.mark.slow
def test_the_page_has_no_inline_handlers_and_its_headings_are_in_order(comparison: str) -> None:
    page = Page(comparison)
    assert [name for _, attrs in page.tags for name in attrs if name.startswith("on")] == []
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.mark.slow
def test_the_content_in_the_page_is_the_content(comparison: str, runs: dict[str, Path]) -> None:
    (data,) = [text for text in Page(comparison).scripts if text.startswith("{")]
    assert json.loads(data) == content([RunRecord.read(folder) for folder in runs.values()])


@pytest.mark.slow
def test_no_name_can_end_the_script_or_the_title(runs: dict[str, Path]) -> None:
    page = content([RunRecord.read(runs["pipar"])])
    page["title"] = "</title></script><script>alert(1)</script><!--"
    text = render(page)
    assert "<script>alert" not in text
    (data,) = [part for part in Page(text).scripts if part.startswith("{")]
    assert json.loads(data)["title"] == page["title"]


def test_a_live_page_waits_for_its_content() -> None:
    page = Page(render(None, live=True))
    sections = [attrs.get("id") for tag, attrs in page.tags if tag in ("section", "script")]
    assert "live" in sections
    assert "content" not in sections
    assert 'id="live"' not in render(None)


def test_the_files_of_the_page_are_in_the_package() -> None:
    static = resources.files("pipar.report") / "static"
    names = {entry.name for entry in static.iterdir()}
    assert {"page.html", "page.css", "page.js", "live.js", "echarts.min.js", "echarts.LICENSE.txt"} <= names
    assert "Licensed to the Apache Software Foundation" in (static / "echarts.min.js").read_text("utf-8")[:400]
