"""The record of a measurement: a JSON file and a line in the table, with machine, date and command."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipar.profiling.cache import machine_fingerprint

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Claim:
    """One measured number, and the bound that it must keep."""

    what: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def holds(self) -> bool:
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    def __str__(self) -> str:
        least = [] if self.least is None else [f"at least {self.least:g}"]
        most = [] if self.most is None else [f"at most {self.most:g}"]
        bound = ", ".join(least + most) or "-"
        mark = "yes" if self.holds else "NO"
        return f"| {self.what} | {self.value:.4g} {self.unit} | {bound} | {mark} |"


def write(name: str, claims: list[Claim], details: dict[str, Any]) -> None:
    """Write benchmarks/results/NAME.json and update the table of all results."""
    RESULTS.mkdir(exist_ok=True)
    content = {
        "name": name,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine_fingerprint(),
        "command": f"python -m benchmarks {name}",
        "claims": [asdict(claim) | {"holds": claim.holds} for claim in claims],
        "details": details,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    _renew_table()


def _renew_table() -> None:
    lines = ["# Results", "", "Written by `make bench`. Each section names the machine, the date and the command.", ""]
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        lines += [f"## {content['name']}", ""]
        lines += [f"{content['date']}, {content['machine']}, `{content['command']}`", ""]
        lines += ["| what | measured | expected | holds |", "|---|---|---|---|"]
        fields = ("what", "value", "unit", "least", "most")
        lines += [str(Claim(**{key: claim[key] for key in fields})) for claim in content["claims"]]
        lines.append("")
    (RESULTS / "README.md").write_text("\n".join(lines))


def pipar(arguments: list[str], runs: Path, *, prefix: tuple[str, ...] = ()) -> Any:
    """Run the command with --json in a separate process and return its output."""
    environment = os.environ | {"PIPAR_RUNS": str(runs)}
    command = [*prefix, sys.executable, "-m", "pipar", *arguments, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)
