"""The output of `pipar plan`: the choice, how busy the lanes are, one iteration as a timeline, and the runners-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipar.cli.cut_view import cuts_table, summary_lines
from pipar.cli.tables import new_table
from pipar.cli.timeline_text import Chart
from pipar.job.explanation import DeviceGroup, ExhaustiveSearch, Explanation, LeakageLimitCost, Option, Plans, Timeline
from pipar.monitoring.epoch_lines import percent
from pipar.planner.fleet import Member
from pipar.planner.search_settings import TIE
from pipar.planner.timing import LANES
from pipar.settings.wording import WHOLE, guess_text, link_text, plan_text, ruled_out_text, whole_network_text

_BAR = 30
_RUNNERS_UP = 5


def plan_view(explained: Explanation) -> RenderableType:
    """Return the whole output of `pipar plan`."""
    parts: list[RenderableType] = [_title(explained), _choice(explained), *_whole_line(explained)]
    parts += [*_encodings(explained), _epoch_line(explained), *_limit_line(explained), _lanes(explained)]
    if explained.states:
        parts += [_states_line(explained), _states(explained)]
    picture = explained.timeline()
    if picture is not None:
        parts += [_picture_title(explained, picture), Chart(picture.spans)]
    if explained.runners_up:
        parts += [_runners_up_title(explained), _runners_up(explained), *_why_not(explained)]
    parts += [Text("\nCuts", style="bold"), cuts_table(explained.job.cut_list()), *_cuts_lines(explained)]
    parts += [Text(), _other_line(explained)]
    if explained.exhaustive is not None:
        parts += [_exhaustive_lines(explained, explained.exhaustive)]
    return Group(*parts, _effort_line(explained))


def _title(explained: Explanation) -> Text:
    job, fleet = explained.job, explained.fleet
    cores = "one core" if fleet.cores == 1 else f"{fleet.cores} cores"
    chosen = "by simulation" if explained.estimate == "simulation" else "by the paper's estimate"
    words = (
        f"{job.model} on {job.dataset}, method {job.method.name}, batches of {fleet.batch_size}, server with {cores}"
    )
    return Text.assemble("\n", (f"Plans, {chosen}", "bold"), f"\n{words}")


# --- the choice


def _choice(explained: Explanation) -> Table:
    """Return one row per group of equal devices; columns that would be empty are left out."""
    rows = explained.rows()
    windows, limits = any(row.plan.window for row in rows), any(row.memory_bytes is not None for row in rows)
    table = new_table()
    table.add_column("devices", overflow="fold")
    table.add_column("machine", no_wrap=True)
    table.add_column("up/down\nMbit/s")
    for title in (
        "P",
        "N",
        *(["schedule"] if windows else []),
        "trained\nafter s",
        *(["memory\nMiB"] if limits else []),
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        schedule = [f"1F1B({row.plan.window})" if row.plan.window else ""] if windows else []
        memory = [_memory_text(row)] if limits else []
        plan = (WHOLE if explained.job.layers == 1 else str(row.plan.split_point), str(row.plan.micro_batches))
        link = link_text(row.devices[0].link).replace(" Mbit/s", "")
        seconds = f"{row.predicted_s:.2f}"
        device = (_devices_text(row.devices), _machine_text(row), link)
        table.add_row(*device, *plan, *schedule, seconds, *memory)
    return table


def _whole_line(explained: Explanation) -> list[Text]:
    """Return a line if the best plan of a method that cuts networks is not to cut this one."""
    job = explained.job
    said = whole_network_text(job.method.name, explained.chosen.plans.values(), job.layers)
    return [Text(f"P = {job.layers} is {said}.")] if said else []


def _encodings(explained: Explanation) -> list[Text]:
    """Return a line for each group of devices that encode what they send."""
    rows = [row for row in explained.rows() if row.plan.encoding != "raw"]
    return [
        Text(f"{_devices_text(row.devices)}: {row.plan.encoding}, {_shares_text(row)} of the bytes") for row in rows
    ]


def _devices_text(members: Sequence[Member]) -> str:
    """Return the name of one device, or the size of a group: "4 x device"."""
    groups = dict.fromkeys(member.name.rpartition("-")[0] or member.name for member in members)
    return members[0].name if len(members) == 1 else f"{len(members)} x {', '.join(groups)}"


def _machine_text(row: DeviceGroup) -> str:
    machine, speed = row.machine or "this machine", row.devices[0].costs.speed
    short = Path(machine).name  # shortens the path of a file; a name has no folder
    return short if speed == 1 else f"{short} x {speed:g}"


def _memory_text(row: DeviceGroup) -> str:
    if row.memory_bytes is None:
        return "no limit"
    return f"{row.needed_bytes / 2**20:.0f} of {row.memory_bytes / 2**20:.0f}"


def _shares_text(row: DeviceGroup) -> str:
    up, down = (percent(share, 0) for share in row.shares)
    return f"{up}/{down}"


def _epoch_line(explained: Explanation) -> Text:
    seconds = f"{explained.chosen.epoch_s:.2f} s"
    return Text.assemble("Predicted epoch ", (seconds, "bold"), ", including the exchange of models at its end")


def _limit_line(explained: Explanation) -> list[Text]:
    """Return which cuts the limit on leakage rules out, and what that costs."""
    limited = explained.leakage_limit
    if limited is None:
        return []
    limit, guess = ruled_out_text(limited.most, limited.ruled_out), guess_text(limited.most, limited.guess)
    return [Text(f"{limit}{_cost_of_limit(explained, limited)}"), *([Text(guess)] if guess else [])]


def _cost_of_limit(explained: Explanation, limited: LeakageLimitCost) -> str:
    if not limited.ruled_out:
        return "."
    if limited.without.plans == explained.chosen.plans:
        return ", at no cost: the plans would be the same without it."
    plans = _plans_text(explained, _without_encodings(limited.without.plans))
    costs = signed_percent(explained.chosen.epoch_s / limited.without.epoch_s - 1)
    return f": {costs} compared to {limited.without.epoch_s:.2f} s with {plans} without it."


def _lanes(explained: Explanation) -> Table:
    """Return how busy the four lanes are."""
    table = Table.grid(padding=(0, 1))
    for lane in LANES:
        share = min(1.0, explained.utilisation[lane])
        full = round(share * _BAR)
        slowest = lane == explained.timing.bottleneck
        bar = Text.assemble(("█" * full, "yellow" if slowest else "green"), ("·" * (_BAR - full), "dim"))
        table.add_row(lane, bar, Text(percent(share, 0).rjust(5)), "<- bottleneck" if slowest else "")
    return table


def _picture_title(explained: Explanation, picture: Timeline) -> Text:
    plan = plan_text(explained.chosen.plans[picture.device], explained.job.layers)
    if picture.whole_epoch:
        return Text(f"\nOne epoch of {picture.device}, {plan}, including the exchange of models\n", style="bold")
    words = f"\nFirst iteration of {picture.device}, {plan}"
    return Text.assemble((words, "bold"), "; the bars above are of the whole epoch\n")


def _states_line(explained: Explanation) -> Text:
    every = sorted({member.link.every_s for member in explained.fleet.members if member.link.cycle})
    times = " or ".join(f"{seconds:g}" for seconds in every)
    changing = "encodings" if explained.job.method.shares_server_model else "plans"
    plans = f"and {changing} with them" if explained.job.can_replan else "but plans stay"
    return Text.assemble((f"\nLinks change every {times} s", "bold"), f", {plans}; the rest is for the first row")


def _states(explained: Explanation) -> Table:
    """Return the plans and the epoch's duration for each state of changing links."""
    table = new_table()
    table.add_column("up/down Mbit/s", overflow="fold")
    table.add_column("plans", overflow="fold")
    table.add_column("s/epoch", justify="right", no_wrap=True)
    for state in explained.states:
        links = ", ".join(link_text(link).replace(" Mbit/s", "") for link in state.links)
        table.add_row(links, _plans_text(explained, state.chosen.plans), f"{state.chosen.epoch_s:.2f}")
    return table


# --- the alternatives


def _runners_up(explained: Explanation) -> Table:
    table = new_table(header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for option in _different(explained.runners_up)[:_RUNNERS_UP]:
        plans = _plans_text(explained, _without_encodings(option.plans))
        table.add_row(plans, f"{option.epoch_s:.2f} s", _against(explained, option))
    return table


def _without_encodings(plans: Plans) -> Plans:
    return {name: replace(plan, up="raw", down="raw") for name, plan in plans.items()}


def _runners_up_title(explained: Explanation) -> Text:
    """Return the title of the runners-up; rows have no room for encodings, which rarely differ from the choice's."""
    coded = any(plan.encoding != "raw" for option in explained.runners_up for plan in option.plans.values())
    return Text.assemble(("\nRunners-up", "bold"), ", without their encodings" if coded else "")


def _different(options: Sequence[Option]) -> list[Option]:
    """Return the options without those that have the same cuts and displayed time as an earlier one."""
    seen: dict[tuple[object, ...], Option] = {}
    for option in options:
        cuts = tuple(plan.split_point for _, plan in sorted(option.plans.items()))
        seen.setdefault((cuts, f"{option.epoch_s:.2f}"), option)
    return list(seen.values())


def _why_not(explained: Explanation) -> list[Text]:
    """Return why a plan that seems faster was not chosen, if there is one."""
    least = min(option.epoch_s for option in explained.runners_up) / explained.chosen.epoch_s
    if least >= 1 or explained.estimate == "paper":
        return []
    if least < 1 - TIE:
        words = "Plans with a minus are not faster on average when layers take up to 15 % more or less than profiled."
    else:
        words = f"Differences up to {TIE * 100:g} % are ties: the plan with fewer micro-batches wins."
    return [Text(words, style="dim")]


def _plans_text(explained: Explanation, plans: Plans) -> str:
    """Return the common plan, or each plan with its devices."""
    if len(set(plans.values())) == 1:
        return plan_text(next(iter(plans.values())), explained.job.layers)
    return ", ".join(f"{_devices_text(row.devices)} {row.plan}" for row in explained.rows(plans))


def _against(explained: Explanation, option: Option) -> str:
    """Return how much longer an epoch would take than with the chosen plans."""
    return signed_percent(option.epoch_s / explained.chosen.epoch_s - 1)


def signed_percent(share: float) -> str:
    """Return a signed difference in per cent; one that rounds to zero has no sign."""
    text = f"{share * 100:+.1f} %"
    return text[1:] if text[1:] == "0.0 %" else text


def _other_line(explained: Explanation) -> Text:
    other = "The paper's estimate" if explained.estimate == "simulation" else "The simulation"
    if explained.other.plans == explained.chosen.plans:
        return Text(f"{other} would have chosen the same.")
    plans, seconds = _plans_text(explained, explained.other.plans), f"{explained.other.epoch_s:.2f} s"
    return Text(
        f"{other} would have chosen {plans}: {seconds} ({_against(explained, explained.other)}) when simulated."
    )


def _cuts_lines(explained: Explanation) -> list[Text]:
    cuts = explained.job.cut_list()
    more = [Text("`pipar cuts` shows why other places are not offered.", style="dim")] if cuts.not_offered else []
    return [*summary_lines(cuts), *more]


def _exhaustive_lines(explained: Explanation, found: ExhaustiveSearch) -> Text:
    best = _plans_text(explained, found.best.plans)
    tried = "All plans" if found.grid is None else f"All plans with N in {', '.join(map(str, found.grid))}"
    counts = f"{found.simulated:,} simulated in {found.seconds:.2f} s, {found.ruled_out:,} ruled out by their bounds"
    return Text.assemble(
        f"Optimum: {best}, {found.best.epoch_s:.2f} s; chosen: {found.chosen_epoch_s:.2f} s; T_opt / T = ",
        (f"{found.score:.3f}", "bold"),
        (f"\n{tried}: {counts}.", "dim"),
    )


def _effort_line(explained: Explanation) -> Text:
    return Text(f"Chosen after {explained.simulations} simulations in {explained.seconds:.2f} s.", style="dim")
