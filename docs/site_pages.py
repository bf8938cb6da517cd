"""Adds to the site the files of the repository that pages of docs/ link to, and the list of decisions.

Documents link to examples, configurations and measurements by relative paths, which work wherever the repository is
read. On the site, each such file becomes a page below "files/", and the links point there. mkdocs calls the functions
that begin with `on_`.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".service": "ini"}
#: Copied unchanged.
PICTURES = (".png", ".svg")
#: The target of a link within the repository, and its anchor.
_LINK = re.compile(r"(?<=\]\()(?!\w+:|[#/])([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_config(config: Any) -> Any:
    """Fill the navigation's "Decisions" with the list of decisions, in order."""
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    listed = [{"All decisions": "decisions/index.md"}, *({_title(page): f"decisions/{page.name}"} for page in pages)]
    config.nav = [{"Decisions": listed} if "Decisions" in entry else entry for entry in config.nav]
    return config


def _title(page: Path) -> str:
    return page.read_text("utf-8").partition("\n")[0].removeprefix("# ")


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures and files outside of docs/ that pages link to, including links from added pages."""
    to_read = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    while to_read:
        name, text = to_read.pop()
        for target in _outside(name, text):
            if files.get_file_from_path(site_name(target)) is None:
                is_picture = target.endswith(PICTURES)
                content = (ROOT / target).read_bytes() if is_picture else page_text(ROOT / target)
                level = InclusionLevel.NOT_IN_NAV
                files.append(File.generated(config, site_name(target), content=content, inclusion=level))
                to_read += [(target, content)] if target.endswith(".md") and isinstance(content, str) else []
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point the links of a page to where the site has their targets."""
    uri: str = page.file.src_uri
    name = uri.removeprefix("files/") if uri.startswith("files/") else f"docs/{uri}"
    here = posixpath.dirname(uri) or "."
    return _with_targets(name, markdown, lambda target: posixpath.relpath(site_name(target), here))


def _with_targets(name: str, text: str, place: Callable[[str], str]) -> str:
    """Return the text of a file, with links to files of the repository replaced by `place(target)`."""

    def replaced(link: re.Match[str]) -> str:
        target = _target(name, link[1])
        return place(target) + (link[2] or "") if (ROOT / target).is_file() else link[0]

    return _LINK.sub(replaced, text)


def _outside(name: str, text: str) -> Iterable[str]:
    targets = {_target(name, link[1]) for link in _LINK.finditer(text)}
    return sorted(target for target in targets if site_name(target).startswith("files/") and (ROOT / target).is_file())


def _target(name: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), link))


def site_name(target: str) -> str:
    """Return the path of a repository file on the site."""
    if target.startswith("docs/") and not target.endswith(".py"):
        return target.removeprefix("docs/")
    return f"files/{target}" if target.endswith((".md", *PICTURES)) else f"files/{target}.md"


def page_text(path: Path) -> str:
    """Return a file as a page: documents unchanged, notebooks cell by cell, other files as a code block."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return text
    title = f"# {path.relative_to(ROOT)}\n\n"
    if path.suffix == ".ipynb":
        return title + "\n\n".join(_cell_text(cell) for cell in json.loads(text)["cells"])
    return title + _fenced(text, LANGUAGES.get(path.suffix, "text"))


def _cell_text(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    return source if cell["cell_type"] == "markdown" else _fenced(source, "python")


def _fenced(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````\n"
