"""Small HTML tables for notebooks: escaped, and in the colours of the page, light or dark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

_TABLE = "font-size:13px;border-collapse:collapse;border:none"
_CELL = "padding:2px 10px 2px 0;border:none;background:none;vertical-align:top"


def html_page(title: str, *parts: str) -> str:
    """Return parts of HTML below a title."""
    head = f'<div style="font-weight:600;margin-bottom:4px">{escape(title)}</div>'
    return f'<div style="font-size:13px;line-height:1.4">{head}{"".join(parts)}</div>'


def html_facts(facts: Mapping[str, str | None]) -> str:
    """Return a list of names and values; facts without a value are left out."""
    rows = (
        f'<tr style="background:none"><th style="{_CELL};text-align:left">{escape(name)}</th>'
        f'<td style="{_CELL};text-align:left">{escape(value)}</td></tr>'
        for name, value in facts.items()
        if value
    )
    return f'<table style="{_TABLE};margin:0 0 6px 0"><tbody>{"".join(rows)}</tbody></table>'


def html_rows(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a head; all columns but the first are numbers, which are aligned on the right."""
    head = "".join(_cell("th", title, place, line=True) for place, title in enumerate(titles))
    body = "".join(
        f'<tr style="background:none">{"".join(_cell("td", text, place) for place, text in enumerate(row))}</tr>'
        for row in rows
    )
    return f'<table style="{_TABLE};margin:0"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def html_line(text: str) -> str:
    """Return a line of text."""
    return f"<div>{escape(text)}</div>"


def _cell(tag: str, text: str, place: int, *, line: bool = False) -> str:
    side, below = "right" if place else "left", ";border-bottom:1px solid currentColor" if line else ""
    return f'<{tag} style="{_CELL};text-align:{side};font-variant-numeric:tabular-nums{below}">{escape(text)}</{tag}>'
