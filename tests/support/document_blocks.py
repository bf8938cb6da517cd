"""The blocks of code in the documents: how they are found, which of them tests run, and a reader that runs them.

A block is fenced, or indented and begins with a command. Three comments before it mean something:
`<!-- not run: REASON -->` says why no test runs it; `<!-- tested with: OPTIONS -->` what is added to each of its
commands when a test runs it, so that it takes seconds; `<!-- as printed -->`, before a block of text, that the commands
before it print every line of it. `title="NAME"` after the language of a block is the file that a reader makes of it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.programs import TESTS, Place, Program
from support.waiting import PATIENCE_S

ROOT = TESTS.parent
#: The first word of an indented block that is a command.
_COMMANDS = re.compile(r"(?:pipar|make|python|pip|\.venv/bin/\w+|[A-Z_]+=\S+) ")
_FENCE = re.compile(r"^( *)```([\w-]*)(?: +(.*))?$")
_COMMENT = re.compile(r"^ *<!-- (.*) -->$")
#: Addresses on which something listens: each test has its own, so that two may run at the same time.
_ADDRESS = re.compile(r"127\.0\.0\.1:([1-9]\d+)")
_SHELL = set("();<>|&")


@dataclass(frozen=True)
class Block:
    """A block of a document, with the line where it begins."""

    document: Path
    line: int
    language: str
    text: str
    info: str = ""  # after the language
    comment: str = ""  # before the fence

    @property
    def title(self) -> str | None:
        found = re.search(r'title="([^"]+)"', self.info)
        return found and found[1]

    @property
    def reason(self) -> str | None:
        """Why no test runs it."""
        return self._said("not run: ")

    @property
    def quickened(self) -> str:
        """The options that are added to each of its commands when a test runs it."""
        return self._said("tested with: ") or ""

    def _said(self, what: str) -> str | None:
        return self.comment.removeprefix(what) if self.comment.startswith(what) else None

    @property
    def is_printed(self) -> bool:
        return self.comment == "as printed"

    @property
    def commands(self) -> list[str]:
        """The commands of a block for the shell, each in one line."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if shlex.split(line, comments=True)]

    @property
    def commands_shown(self) -> list[str]:
        """The lines that begin with `pipar`, also those of a synopsis with words in capitals."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line.startswith("pipar ")]

    def __str__(self) -> str:
        return f"{os.path.relpath(self.document, ROOT)}:{self.line}"


def documents() -> list[Path]:
    """Return every document for users."""
    return sorted([ROOT / "README.md", ROOT / "deploy" / "README.md", *ROOT.glob("docs/**/*.md")])


def blocks_of(document: Path) -> list[Block]:
    """Return the blocks of a document in their order."""
    return list(_blocks(document, document.read_text("utf-8").splitlines()))


def _blocks(document: Path, lines: list[str]) -> Iterator[Block]:
    comment, at = "", 0
    while at < len(lines):
        line, start = lines[at], at + 1
        if fence := _FENCE.match(line):
            indent, language, info = fence[1], fence[2], fence[3] or ""
            end = next(n for n in range(start, len(lines)) if lines[n] == f"{indent}```")
            text = "\n".join(inner.removeprefix(indent) for inner in lines[start:end]) + "\n"
            yield Block(document, start, language, text, info, comment)
            at = end
        elif line.startswith("    ") and _COMMANDS.match(line.lstrip()) and not (at and lines[at - 1].strip()):
            end = next((n for n in range(start, len(lines)) if not lines[n].startswith("    ")), len(lines))
            yield Block(document, start, "sh", "\n".join(inner[4:] for inner in lines[at:end]) + "\n", "", comment)
            at = end - 1
        if line.strip():
            found = _COMMENT.match(line)
            comment = found[1] if found else ""
        at += 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Reader:
    """Follows a document, block after block, in a folder with the repository's examples."""

    place: Place
    printed: str = ""  # printed by the last block with commands
    _ports: dict[str, int] = field(default_factory=dict)

    def do(self, block: Block) -> None:
        if block.title is not None:
            self._file(block.title).write_text(block.text, "utf-8")
        elif block.language == "sh":
            self.printed = ""
            for line in block.commands:
                self._type(f"{line} {block.quickened}")
        elif block.language == "python":
            self.printed = ""
            script = self._file(f"block_{block.line}.py")
            script.write_text(block.text, "utf-8")
            self.end()
            self._ended(self.place.run("python", script.name))
        elif block.is_printed:
            self._compare(block)

    def _file(self, name: str) -> Path:
        return self.place.folder / name

    def _type(self, line: str) -> None:
        line = _ADDRESS.sub(lambda found: f"127.0.0.1:{self._port(found[1])}", line)
        words = shlex.split(line, comments=True)
        words[0] = words[0].removeprefix(".venv/bin/")
        if words[0] == "make":
            for command in recipe(words[1]):
                self._type(f"{command} {shlex.join(words[2:])}")
        elif words[0] == "pipar" and not _has_shell_syntax(line):
            self._run(words[1:])
        elif words[0] == "python" and words[1] != "-c":
            self.end()
            self._ended(self.place.run("python", *words[1:]))
        elif words[0] == "python":
            self._wait_for([sys.executable, *words[1:]])
        else:
            self._wait_for(["bash", "-euc", line])

    def _port(self, written: str) -> int:
        return self._ports.setdefault(written, free_port())

    def _run(self, words: list[str]) -> None:
        """Run a command to its end; servers and devices keep running, as in separate terminals."""
        if words[0] not in ("server", "device"):
            self.end()
        program = self.place.run(words[0], *words)
        if words[0] == "server":
            program.says(r"listening on")  # an earlier device may measure its machine at the same time
        elif words[0] != "device":
            self._ended(program)

    def _ended(self, program: Program) -> None:
        code = program.ends()
        self.printed += program.text()
        assert code == 0, f"{program.name} ended with {code}: {program.text()}"

    def end(self) -> None:
        """Wait until the devices have ended, and then their servers."""
        devices = [program for program in self.place.programs if program.name == "device"]
        for program in devices:
            self._ended(program)
        if devices:
            for program in self.place.programs:
                if program.name == "server":
                    self._ended(program)
            self.place.programs.clear()

    def _wait_for(self, command: list[str]) -> None:
        self.end()
        done = subprocess.run(
            command,
            cwd=self.place.folder,
            env=self.place.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        self.printed += done.stdout
        assert done.returncode == 0, done.stdout

    def _compare(self, block: Block) -> None:
        wanted = [line for line in map(_squeezed, block.text.splitlines()) if line not in ("", "...")]
        printed = {_squeezed(line) for line in self.printed.splitlines()}
        assert [line for line in wanted if line not in printed] == [], f"{block} has other lines than\n{self.printed}"


def _squeezed(line: str) -> str:
    return " ".join(line.split())


def _has_shell_syntax(line: str) -> bool:
    tokens = shlex.shlex(line, posix=True, punctuation_chars=True)
    return any(set(token) <= _SHELL for token in tokens)


def make_targets() -> set[str]:
    return set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def recipe(target: str) -> list[str]:
    """Return the commands that a target of make runs in an environment that is set up."""
    command = ["make", "--dry-run", "--no-print-directory", "--old-file=.venv/ready", target]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=True)
    return said.stdout.splitlines()


@contextmanager
def reader(folder: Path, cache: Path, variables: Mapping[str, str]) -> Iterator[Reader]:
    """Give a reader in a new folder; at the end, all its programs are ended."""
    for name in ("examples", "deploy"):
        shutil.copytree(ROOT / name, folder / name)
    programs = folder / "bin"
    programs.mkdir()
    (programs / "pipar").write_text(f'#!/bin/sh\nexec {sys.executable} -m pipar "$@"\n', "utf-8")
    (programs / "pipar").chmod(0o755)
    place = Place(folder, cache, {})
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    modules = os.pathsep.join([place.environment["PYTHONPATH"], str(ROOT)])  # for `python -m simulation` and the like
    place.environment |= {"COLUMNS": "80", "PATH": path, "PYTHONPATH": modules, "PIPAR_DATA": str(folder / "data")}
    place.environment |= variables
    try:
        made = Reader(place)
        yield made
        made.end()
        assert [program.name for program in place.programs if program.poll() is None] == [], (
            "a server still waits for devices, or a device for its server"
        )
    finally:
        place.end()
