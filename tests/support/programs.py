"""Commands of pipar as real processes: started, waited for, and always ended."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w

from support.waiting import until

TESTS = Path(__file__).parents[1]
_MARK = "PIPAR_TEST_PROGRAM"


class Zygote:
    """The process that programs are forked from; see zygote.py."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
        self._process = subprocess.Popen(
            [sys.executable, str(TESTS / "support" / "zygote.py")],
            env={**os.environ, "PYTHONPATH": paths}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@cache
def zygote() -> Zygote:
    """Return the zygote of this process, which ends with it."""
    started = Zygote()
    atexit.register(started.end)
    return started


class Program:
    """One command as a process. Its output is read from a file, line by line."""

    def __init__(self, name: str, words: list[str], place: Place, **how: Any) -> None:
        self.name = name
        self.code: int | None = None
        self._output = place.folder / f"{name}-{uuid.uuid4().hex[:6]}.log"
        self._output.touch()
        self._zygote = zygote()
        environment = {**place.environment, "GATE": name}
        how |= {"environment": environment, "finalize": place.finalizes}
        request = {"start": words, "folder": str(place.folder), "output": str(self._output), **how}
        self.pid: int = self._zygote.ask(request)

    def poll(self) -> int | None:
        """Return its exit code, minus the signal that ended it; None while it runs."""
        if self.code is None:
            self.code = self._zygote.ask({"poll": self.pid})
        return self.code

    def text(self) -> str:
        return self._output.read_text("utf-8")

    def lines(self) -> list[str]:
        return self.text().splitlines()

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return its lines, with --log-format json, as objects."""
        whole = self.text().rpartition("\n")[0].splitlines()
        rows = [json.loads(line) for line in whole]
        return rows if kind is None else [row for row in rows if row.get("event") == kind]

    def says(self, pattern: str, times: int = 1) -> re.Match[str]:
        """Return the match once the pattern has been printed `times` times; fail if the program ends before that."""

        def found() -> re.Match[str] | None:
            ended = self.poll() is not None  # asked first, so that lines written before its end count
            matches = list(re.finditer(pattern, self.text()))
            if len(matches) >= times:
                return matches[times - 1]
            assert not ended, f"{self.name} ended with {self.code}, never printed {pattern!r}: {self.text()}"
            return None

        try:
            match = until(found, f"{self.name} to print {pattern!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.last_words()}") from None
        assert isinstance(match, re.Match)
        return match

    def ends(self) -> int:
        """Return its exit code."""
        try:
            until(lambda: self.poll() is not None, f"{self.name} to end")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.last_words()}") from None
        assert self.code is not None
        return self.code

    def signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def last_words(self) -> str:
        """Return its output; a program that still runs, and so hangs, is ended and adds what each thread is doing."""
        self.signal(signal.SIGABRT)
        with contextlib.suppress(AssertionError):
            until(lambda: self.poll() is not None, "stacks", 10)
        return self.text()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.ends()

    def rss_bytes(self) -> int:
        return _memory(self.pid, "VmRSS")

    def live_bytes(self) -> int:
        """Return the bytes that it has allocated and not freed."""
        answer = self._output.with_name(self._output.name + ".live")
        answer.unlink(missing_ok=True)
        self.signal(signal.SIGUSR1)
        until(answer.exists, f"{self.name} to report its memory in use")
        return int(answer.read_text("utf-8"))

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def peak_bytes(self) -> int:
        return _memory(self.pid, "VmHWM")


def _memory(pid: int, key: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    match = re.search(rf"^{key}:\s+(\d+) kB$", status, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


class Place:
    """A folder in which programs run, with their configuration and the files that they write."""

    def __init__(self, folder: Path, cache: Path, tree: Mapping[str, Any]) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.programs: list[Program] = []
        self.finalizes = False  # whether its programs free all modules at their end, as Python does; a second for each
        self.environment = {
            **os.environ,
            "PIPAR_RUNS": str(folder / "runs"),
            "XDG_CACHE_HOME": str(cache),
            "GATES": str(folder),
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]),
            _MARK: self.mark,
        }
        self.write(tree)

    def write(self, tree: Mapping[str, Any], name: str = "train.toml") -> None:
        (self.folder / name).write_text(tomli_w.dumps(dict(tree)), "utf-8")

    def run(
        self, name: str, *words: str, namespace: str | None = None, files: tuple[int, int] | None = None
    ) -> Program:
        """Start a command, in a network namespace or with a soft and a hard limit of open files if these are given."""
        program = Program(name, list(words), self, namespace=namespace, files=files)
        self.programs.append(program)
        return program

    def server(
        self,
        *words: str,
        listen: str = "127.0.0.1:0",
        namespace: str | None = None,
        files: tuple[int, int] | None = None,
    ) -> Program:
        return self.run("server", "server", "train.toml", "--listen", listen, *words, namespace=namespace, files=files)

    def device(
        self, name: str, address: str, *words: str, config: str = "train.toml", namespace: str | None = None
    ) -> Program:
        return self.run(name, "device", config, "--server", address, "--name", name, *words, namespace=namespace)

    # --- gates

    def hold(self, name: str, after: int | None = None) -> None:
        """Stop a program when it next computes; one that is not started yet `after` some batches, if given."""
        (self.folder / f"{name}.held").unlink(missing_ok=True)
        (self.folder / f"{name}.hold").write_text("" if after is None else str(after), "utf-8")

    def wait_until_held(self, name: str) -> None:
        try:
            until((self.folder / f"{name}.held").exists, f"{name} to be in mid-epoch")
        except AssertionError as error:
            texts = "\n".join(f"--- {program.name}\n{program.last_words()}" for program in self.programs)
            raise AssertionError(f"{error}\n{texts}") from None

    def let_go(self, name: str) -> None:
        """Let a held program continue; it has when this returns."""
        (self.folder / f"{name}.hold").unlink(missing_ok=True)
        held = self.folder / f"{name}.held"
        runs = [program for program in self.programs if program.name == name and program.poll() is None]
        until(lambda: not held.exists() or all(program.poll() is not None for program in runs), f"{name} to continue")
        held.unlink(missing_ok=True)

    # --- files and processes that are left

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / "it"

    def rounds(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_folder / "rounds.jsonl").read_text("utf-8").splitlines()]

    def result(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run_folder / "result.json").read_text("utf-8"))
        return content

    def leftovers(self) -> list[str]:
        """Return the temporary files in the run's folder."""
        names = [str(path.relative_to(self.run_folder)) for path in self.run_folder.rglob("*")]
        return [name for name in names if "partial" in name or "tmp" in name or Path(name).name.startswith(".")]

    def alive(self) -> list[str]:
        """Return the command lines of all running processes that this place's programs have started."""
        found = [program.name for program in self.programs if program.poll() is None]
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdecimal() and f"{_MARK}={self.mark}".encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found

    def end(self) -> None:
        """End every program that still runs."""
        for program in self.programs:
            program.kill()
        with contextlib.suppress(AssertionError):
            until(lambda: not self.alive(), "orphans to end", 10)


@contextlib.contextmanager
def place(folder: Path, cache: Path, tree: Mapping[str, Any]) -> Iterator[Place]:
    """Give a place; at the end, all its programs are ended."""
    made = Place(folder, cache, tree)
    try:
        yield made
    finally:
        made.end()


def address_of(server: Program) -> str:
    return server.says(r"listening on (\S+:\d+)")[1]
