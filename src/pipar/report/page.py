"""One self-contained HTML page: markup, style, charts and, unless it is live, the content."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

_STATIC = resources.files("pipar.report") / "static"
_PLACE = re.compile(r"<!--\s*pipar:(\w+)\s*-->")


def render(content: Mapping[str, Any] | None, *, live: bool = False) -> str:
    """Return the page. A live one has no content: its script receives it from the server."""
    parts = {
        "title": _text(str(content["title"])) if content else "pipar",
        "style": f"<style>\n{_static('page.css')}{_static('live.css') if live else ''}</style>",
        "live": '<section id="live" aria-label="Live"></section>' if live else "",
        "content": f'<script type="application/json" id="content">{_data(content)}</script>' if content else "",
        "scripts": "\n".join(_script(name) for name in ("echarts.min.js", "page.js", *(["live.js"] if live else []))),
    }
    return _PLACE.sub(lambda place: parts[place[1]], _static("page.html"))


def _static(name: str) -> str:
    return (_STATIC / name).read_text("utf-8")


def _script(name: str) -> str:
    return f"<script>\n{_static(name)}\n</script>"


def _data(content: Mapping[str, Any]) -> str:
    """Return JSON without "<", so that no name of a device can end the script tag."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _text(words: str) -> str:
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
