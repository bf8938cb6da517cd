"""report.html of a run, or of several that are compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipar.errors import InputError
from pipar.job import Job
from pipar.methods import Plan
from pipar.report.content import content
from pipar.report.outlook import outlook
from pipar.report.page import render
from pipar.report.record import RunRecord
from pipar.results import strict_json, write_atomically

REPORT = "report.html"


def write_report(folder: Path | str, *, job: Job | None = None, output: Path | None = None) -> Path:
    """Write a run's page into its folder, or to `output`, and return where it is.

    With its job the run gets an outlook.json, too: what would make it faster. Without, the one that is there counts.
    """
    if job is not None:
        _write_outlook(Path(folder), job)
    return write_comparison([folder], output or Path(folder) / REPORT)


def write_comparison(folders: Sequence[Path | str], output: Path) -> Path:
    """Write one page of several runs, and return where it is."""
    page = render(strict_json(content([RunRecord.read(folder) for folder in folders])))
    try:
        write_atomically(output, page.encode())
    except OSError as error:
        raise InputError(f"Cannot write {output}: {error.strerror}.") from None
    return output


def _write_outlook(folder: Path, job: Job) -> None:
    """Write what the planner says of the plans that the training ended with."""
    result = json.loads((folder / "result.json").read_text("utf-8"))
    entries = (result["replans"] or [result])[-1]["plans"]
    plans = {entry["device"]: Plan(**{key: entry[key] for key in entry if key != "device"}) for entry in entries}
    here = {name: plans[name] for name in job.sizes if name in plans}
    if len(here) == len(job.sizes):
        written = strict_json(outlook(job, here))
        write_atomically(folder / "outlook.json", (json.dumps(written, indent=1) + "\n").encode())
