"""`pipar.plan`: the chosen plans, and why, as an object to look at."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipar.events import LOADING, Observer, Preparing
from pipar.html_table import html_facts, html_line, html_page, html_rows
from pipar.launch.run import configuration_of, shown_as, with_functions
from pipar.methods import Plan
from pipar.settings.config import Config
from pipar.settings.wording import link_text
from pipar.storage import result_views
from pipar.units import format_percent

if TYPE_CHECKING:
    import pandas

    from pipar.job.explanation import DeviceGroup, Explanation
    from pipar.job.job import Job

#: Width of the text, and the runners-up in HTML.
_WIDTH = 110
_RUNNERS_UP = 5


def plan(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    model: Any = None,
    cut_points: Sequence[str] | None = None,
    datasets: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[list[tuple[str, Any]]], Any] | None = None,
    settings: Sequence[str] = (),
    exhaustive: bool = False,
    progress: bool | None = None,
) -> ChosenPlans:
    """Choose the split point (P) and the micro-batches (N) of every device, and return them with the reasons.

    Nothing is trained. The arguments are those of `run`, which trains with the same plans. `exhaustive` also tries
    every plan, to check the choice.

    >>> chosen = pipar.plan(settings=SMALL)
    >>> sorted(chosen.plans)
    ['device-1', 'device-2', 'device-3', 'device-4']
    """
    from pipar.job.explain import explain
    from pipar.launch.rehearsal import rehearse

    resolved = with_functions(configuration_of(config, settings, datasets, cut_points), loss, optimizer=optimizer)
    with shown_as("plan", resolved, progress, model=model, datasets=datasets) as observe:
        job = _job(resolved, (model, datasets, None, None, loss, None, optimizer), observe)
        return ChosenPlans(explain(job, rehearse, exhaustive=exhaustive, observe=observe))


def _job(config: Config, own: tuple[Any, ...], observe: Observer) -> Job:
    """Return the job without plans; `own` are the user's objects, in the order of `UserObjects.of`."""
    from pipar.job.prepare import job_to_plan, unplanned_job

    if all(one is None for one in own):
        return job_to_plan(config, observe)
    observe(Preparing(LOADING, 0.0))
    from pipar.job.user_objects import UserObjects  # imports torch
    from pipar.job.workload import Workload  # imports torch

    objects = UserObjects.of(config, *own).with_catalog_form(config)
    return unplanned_job(Workload(config, objects), observe, needs_data=False)


@dataclass(frozen=True, repr=False)
class ChosenPlans:
    """The plans of all devices and why they were chosen; `print` shows what `pipar plan` does, a notebook a table.

    >>> chosen = pipar.plan(settings=SMALL)
    >>> chosen.bottleneck in ("device", "uplink", "server", "downlink")
    True
    """

    explanation: Explanation

    @property
    def plans(self) -> dict[str, Plan]:
        """The plan of each device: `split_point`, `micro_batches`, `window` of 1F1B, encodings `up` and `down`."""
        return dict(self.explanation.chosen.plans)

    @property
    def predicted_epoch_s(self) -> float:
        """Seconds that an epoch will take, with the exchange of models at its end."""
        return self.explanation.chosen.epoch_s

    @property
    def bottleneck(self) -> str:
        """The busiest lane: device, uplink, server or downlink."""
        return self.explanation.timing.bottleneck

    @property
    def runners_up(self) -> list[tuple[dict[str, Plan], float]]:
        """The next best plans, each with the seconds of its epoch."""
        return [(dict(option.plans), option.epoch_s) for option in self.explanation.runners_up]

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `pipar plan --json` prints.

        >>> chosen = pipar.plan(settings=SMALL)
        >>> chosen.to_dict()["predicted_epoch_s"] == chosen.predicted_epoch_s
        True
        """
        return self.explanation.to_dict()

    def frame(self) -> pandas.DataFrame:
        """Return one row for each device as a DataFrame of pandas: its plan, its seconds and its memory.

        >>> pipar.plan(settings=SMALL).frame()["needed_bytes"].min() > 0
        np.True_
        """
        rows = [
            {"device": member.name, **_row(group), "predicted_s": self.explanation.predicted_s[member.name]}
            for group in self.explanation.rows()
            for member in group.devices
        ]
        return result_views.frame(rows, "device", "ChosenPlans.frame()")

    def __str__(self) -> str:
        from rich.console import Console

        from pipar.cli.plan_view import plan_view

        out = io.StringIO()
        Console(file=out, width=_WIDTH, color_system=None).print(plan_view(self.explanation))
        return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())

    def __repr__(self) -> str:
        devices = len(self.explanation.chosen.plans)
        return f"ChosenPlans({devices} devices, predicted epoch {self.predicted_epoch_s:.2f} s)"

    def _repr_html_(self) -> str:
        job, runners_up = self.explanation.job, _html_options(self.explanation)
        facts = {
            "predicted epoch": f"{self.predicted_epoch_s:.2f} s",
            "bottleneck": self.bottleneck,
            "busy": ", ".join(f"{lane} {_percent(share)}" for lane, share in self.explanation.utilisation.items()),
        }
        title = f"Plans of {result_views.subject(job.model, job.dataset)}, {job.method.name}"
        heads = ["devices", "machine", "link", "P", "N", "encoding", "trained after s", "memory MiB"]
        table = html_rows(heads, [_html_row(group) for group in self.explanation.rows()])
        more = [html_line("Runners-up"), html_rows(["plans", "s/epoch", "longer"], runners_up)] if runners_up else []
        return html_page(title, html_facts(facts), table, *more)


def _row(group: DeviceGroup) -> dict[str, Any]:
    document = group.to_dict()
    kept = (
        "split_point",
        "micro_batches",
        "schedule",
        "encoding",
        "bottleneck",
        "needed_bytes",
        "memory_bytes",
        "speed",
    )
    return {**{key: document[key] for key in kept}, "machine": group.machine or "this machine"}


def _html_row(group: DeviceGroup) -> list[str]:
    needed, memory = group.needed_bytes / 2**20, group.memory_bytes
    names = group.devices[0].name if len(group.devices) == 1 else f"{len(group.devices)} x {group.devices[0].name} ..."
    return [
        names,
        group.machine or f"this machine x {group.devices[0].costs.speed:g}",
        link_text(group.devices[0].link),
        str(group.plan.split_point),
        str(group.plan.micro_batches),
        group.plan.encoding,
        f"{group.predicted_s:.2f}",
        f"{needed:.0f}" if memory is None else f"{needed:.0f} of {memory / 2**20:.0f}",
    ]


def _html_options(explanation: Explanation) -> list[list[str]]:
    chosen_s = explanation.chosen.epoch_s
    return [
        [
            result_views.plans({"plans": [vars(plan) for plan in option.plans.values()]}),
            f"{option.epoch_s:.2f}",
            f"{(option.epoch_s / chosen_s - 1) * 100:+.1f} %",
        ]
        for option in explanation.runners_up[:_RUNNERS_UP]
    ]


def _percent(share: float) -> str:
    return f"{format_percent(min(1.0, share), 0)} %"
