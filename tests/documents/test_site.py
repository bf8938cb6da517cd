"""The site builds without a warning, loads nothing from other sites, and documents every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from support.waiting import PATIENCE_S

import pipar

ROOT = Path(__file__).parents[2]
#: Resources that a browser fetches by itself; links that a user clicks do not count.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|audio|video|embed|object)\b[^>]*?\b(?:src|data)\s*=\s*["']?([^"'\s>]+)"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|icon|preload|preconnect|dns-prefetch|prefetch|manifest))[^>]*?\bhref=["']?([^"'\s>]+)"""
    r"""|url\(["']?([^"')]+)|@import\s+["']([^"']+)""",
    re.IGNORECASE,
)
FOREIGN = re.compile(r"(?:[a-z]+:)?//", re.IGNORECASE)


def fetched(text: str) -> list[str]:
    """Return the resources that a page or a stylesheet makes a browser fetch."""
    return [next(filter(None, groups), "") for groups in FETCHED.findall(text)]


def foreign(text: str) -> list[str]:
    return [address for address in fetched(text) if FOREIGN.match(address)]


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://example.org/x.js"></script>',
        '<link rel="stylesheet" href="//example.org/x.css">',
        '<link href="https://example.org" rel=preconnect>',
        "a { background: url(https://example.org/x.png) }",
    ],
)
def test_foreign_resources_are_found(text: str) -> None:
    assert len(foreign(text)) == 1


def test_a_plain_link_is_not_a_foreign_resource() -> None:
    assert foreign('<a href="https://example.org">there</a> <link rel="canonical" href="https://example.org">') == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    # The theme's authors announce a preview in warnings, which are about another version.
    variables = {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_and_has_no_foreign_resources(site: Path) -> None:
    texts = {path: path.read_text("utf-8") for path in site.rglob("*") if path.suffix in (".html", ".css")}
    assert len(texts) > 40
    assert {str(path.relative_to(site)): found for path, text in texts.items() if (found := foreign(text))} == {}


@pytest.mark.slow
def test_links_to_files_of_the_repository_become_pages(site: Path) -> None:
    page = (site / "how-to" / "own-aggregator.html").read_text("utf-8")
    assert 'href="../files/examples/own_aggregator.py.html"' in page
    assert "class" in (site / "files" / "examples" / "own_aggregator.py.html").read_text("utf-8")


@pytest.mark.slow
def test_the_reference_has_every_command_and_every_public_name(site: Path) -> None:
    from pipar.cli import cli

    commands = (site / "reference" / "cli.html").read_text("utf-8")
    assert [name for name in cli.list_commands(click.Context(cli)) if f'id="pipar-{name}"' not in commands] == []
    python = (site / "reference" / "python.html").read_text("utf-8")
    assert [name for name in pipar.__all__ if f'id="{name.lower()}"' not in python] == []
