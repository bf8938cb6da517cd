"""Writing report.html of one run, or the comparison of several."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pipar.errors import InputError, PiparError
from pipar.events import Observer, ReportFailed, ReportWritten
from pipar.job.job import Job
from pipar.planner.fleet import Fleet
from pipar.report.content import content
from pipar.report.page import render
from pipar.report.record import RunRecord
from pipar.report.what_if import what_if
from pipar.settings.config import Config
from pipar.storage.run_json import plan_from_json, strict_json
from pipar.storage.run_names import comparison_name, new_folder
from pipar.storage.whole_files import PRIVATE, write_atomically

REPORT = "report.html"


def write_report(
    folder: Path | str, *, job: Job | None = None, fleet: Fleet | None = None, output: Path | None = None
) -> Path:
    """Write a run's page into its folder, or to `output`, and return its path.

    With its job, the predictions of `what_if` are written to outlook.json first, for `fleet` if the training has
    measured one. Without it, an existing outlook.json is used.
    """
    if job is not None:
        _write_outlook(Path(folder), job, fleet)
    return write_comparison([folder], output or Path(folder) / REPORT)


def try_write_report(
    folder: Path, observe: Observer, *, job: Job | None = None, fleet: Fleet | None = None
) -> Path | None:
    """Write the page of a finished run; an error becomes a ReportFailed event and does not fail the run."""
    again = f"To retry: pipar report {folder}"
    return _try(lambda: write_report(folder, job=job, fleet=fleet), folder, again, observe)


def try_write_comparison(folders: Sequence[Path], config: Config, observe: Observer) -> Path | None:
    """Write one page about finished runs into a new folder, with errors handled as in `try_write_report`."""

    def write() -> Path:
        page, first = _page(folders), RunRecord.read(folders[0]).result  # first: without a page, no folder is made
        folder = new_folder(comparison_name(config, first["model"], first["dataset"]))
        return _written(page, folder / REPORT)

    again = f"To retry: pipar report {' '.join(map(str, folders))}"
    return _try(write, Path("the comparison"), again, observe)


def _try(write: Callable[[], Path], of: Path, again: str, observe: Observer) -> Path | None:
    try:
        path = write()
    except Exception as error:  # noqa: BLE001 - a training must not fail because of its page
        why = str(error) if isinstance(error, PiparError) else f"{type(error).__name__}: {error}."
        observe(ReportFailed(f"No report of {of}: {why} {again}"))
        return None
    observe(ReportWritten(str(path)))
    return path


def write_comparison(folders: Sequence[Path | str], output: Path) -> Path:
    """Write one page about several runs, and return its path."""
    return _written(_page(folders), output)


def _page(folders: Sequence[Path | str]) -> bytes:
    return render(strict_json(content([RunRecord.read(folder) for folder in folders]))).encode()


def _written(page: bytes, output: Path) -> Path:
    try:
        write_atomically(output, page)
    except OSError as error:
        raise InputError(f"Cannot write {output}: {error.strerror}.") from None
    return output


def _write_outlook(folder: Path, job: Job, fleet: Fleet | None) -> None:
    """Write the planner's predictions, based on the last plans of the training."""
    result = json.loads((folder / "result.json").read_text("utf-8"))
    entries = (result["replans"] or [result])[-1]["plans"]
    plans = {entry["device"]: plan_from_json(entry) for entry in entries}
    here = {name: plans[name] for name in job.sizes if name in plans}
    if len(here) == len(job.sizes):
        written = strict_json(what_if(job, here, fleet))
        write_atomically(folder / "outlook.json", (json.dumps(written, indent=1) + "\n").encode(), mode=PRIVATE)
