"""Progress is shown in terminals and notebooks, as lines elsewhere if asked for, and never if not wanted."""

from __future__ import annotations

import sys
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest

from pipar.events import Starting, ignore
from pipar.monitoring.display import Display
from pipar.monitoring.notebook_display import NotebookDisplay
from pipar.monitoring.progress_display import shown

STARTING = Starting("run", "vgg5 on digits with fl")


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def chosen(progress: bool | None, stream: StringIO, monkeypatch: pytest.MonkeyPatch, kernel: Any = None) -> Any:
    """Return the object whose method observes, None for none; IPython's shell has this kernel."""
    published = SimpleNamespace(publish=lambda **_: None)
    shell = SimpleNamespace(kernel=kernel, display_pub=published)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(sys, "stderr", stream)
    with shown(progress, STARTING) as observe:
        return None if observe is ignore else observe.__self__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("progress", "stream", "kernel", "found"),
    [
        (None, StringIO, None, None),
        (None, Terminal, None, Display),
        (None, StringIO, object(), NotebookDisplay),
        (True, StringIO, None, Display),
        (False, Terminal, None, None),
        (False, StringIO, object(), None),
    ],
)
def test_where_progress_is_shown(
    progress: bool | None, stream: Any, kernel: Any, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    display = chosen(progress, stream(), monkeypatch, kernel)
    assert display is None if found is None else isinstance(display, found)


def test_lines_say_at_once_what_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    written = StringIO()
    chosen(True, written, monkeypatch)
    assert "vgg5 on digits with fl" in written.getvalue()


def test_a_log_of_ci_has_no_progress_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    assert chosen(None, Terminal(), monkeypatch) is None
