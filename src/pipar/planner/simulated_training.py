"""A whole training, simulated: round after round, with the messages between them and what the programs record.

    server   ... averages | packs | to every device: MODEL, REPORT, and ROUND of the next round
    device   ... MODEL: installs | REPORT: sends its trace | ROUND: loads its first batch

Where only some devices take part in a round, REPORT comes alone, and MODEL and ROUND when a device is drawn. Times,
bytes and traces are those of a timing-only run of the programs.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field

from pipar.execution.clock import clock_machine
from pipar.execution.spans import EpochTrace, Span
from pipar.execution.work import Work
from pipar.methods import Plan
from pipar.planner.fleet import Fleet
from pipar.planner.replanner import MeasuredLink
from pipar.planner.simulated_party import Party, RoundSizes, round_sizes
from pipar.planner.simulated_round import NumberedCores, RoundStart, SimulatedRound
from pipar.planner.stage_times import framed_bytes, work_key
from pipar.wire.messages import json_body
from pipar.wire.orders import Orders


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What the server knows of a device's round when its trace has arrived."""

    trace: EpochTrace
    downlink: EpochTrace
    bytes_up: int
    bytes_down: int


@dataclass
class ServerReport:
    """The work of the server's cores in a round; the spans are those that are kept."""

    busy_s: float = 0.0
    seconds: float = 0.0  # from the beginning of the round to its new model
    spans: list[Span] = field(default_factory=list)


class SimulatedTraining:
    """A training of devices that all join before the first round, keep their plans and stay to the end.

    `watch` are the devices whose spans are kept; None: all.
    """

    def __init__(
        self, fleet: Fleet, orders: Mapping[str, Orders], *, draws: bool = False, watch: Container[str] | None = None
    ) -> None:
        self._plans = {name: one.plan for name, one in orders.items()}
        self._fleet, self._draws = fleet, draws
        self._profile, self._server = fleet.server.profile, fleet.server
        self._sizes: dict[tuple[object, ...], RoundSizes] = {}
        self._parties = {
            member.name: Party(member, watched=watch is None or member.name in watch) for member in fleet.members
        }
        for name, party in self._parties.items():
            self._give_plan(party, self._plans[name])
        any_watched = any(party.watched for party in self._parties.values())
        self._lanes = NumberedCores(fleet.cores) if any_watched else None
        self._now = 0.0  # on the server's clock
        self._began_at = 0.0
        self._group: list[Party] = []
        self._round: SimulatedRound | None = None
        self._report = ServerReport()
        self._reports: list[DeviceReport] = []
        self._join(orders)

    # --- before the first round

    def _join(self, orders: Mapping[str, Orders]) -> None:
        """Let all devices join, and welcome them."""
        for party in self._parties.values():
            hello = json_body({"name": party.member.name, "samples": party.member.samples})
            self._now = max(self._now, party.up.send(0.0, 0, hello.size_bytes, counted=False))
        machine, known = clock_machine(), dict[tuple[object, ...], int]()
        for name, party in self._parties.items():
            given = orders[name]
            key = (given.plan, len(str(given.session)), given.changes_below_bps)
            if key not in known:
                known[key] = given.to_body().size_bytes
            party.join(machine, party.down.send(self._now, 0, known[key]))
            if not self._draws:
                self._make_replica()
        self._began_at = self._now

    def _make_replica(self) -> None:
        self._work("install", Work("install"))

    def _give_plan(self, party: Party, plan: Plan) -> None:
        party.plan = plan
        key = work_key(party.member, plan)
        if key not in self._sizes:
            self._sizes[key] = round_sizes(self._fleet, party.member, plan)
        party.sizes = self._sizes[key]

    # --- a round

    def train(self, number: int, drawn: Collection[str] | None = None) -> None:
        """Train a round up to the arrival of the last trained part; with `drawn`, only these devices take part."""
        self._report, self._round = ServerReport(), None
        parties = [party for name, party in self._parties.items() if drawn is None or name in drawn]
        if self._draws:
            for _ in parties:
                self._make_replica()
        self._distribute([party for party in parties if not party.has_model_of(number - 1)], number - 1)
        self._reports, self._group = self._take_reports(), parties
        for party in parties:
            party.begin(number, party.down.send(self._now, number, 0))
        self._round = SimulatedRound(
            self._fleet if drawn is None else self._fleet.of(frozenset(drawn)),
            self._plans,
            number,
            {party.member.name: RoundStart(party.ready_at, party.up.free, party.down.free) for party in parties},
            lambda name: self._parties[name].end_bytes(self._fleet.local_epochs),
            watch=frozenset(party.member.name for party in parties if party.watched),
            lanes=self._lanes,
        )
        self._round.train()
        for device in self._round.devices:
            party = self._parties[device.member.name]
            changes = self._fleet.sends_changes(party.member, party.member.link.up_bps)
            model = framed_bytes(self._profile.exchanged_bytes(party.plan.split_point, changes=changes))
            party.end(device, model)

    @property
    def measured(self) -> dict[str, MeasuredLink]:
        """The links as the traffic of the round has shown them."""
        return {party.member.name: party.measured for party in self._group}

    def average(self) -> None:
        """Make the new global model of all parts."""
        assert self._round is not None
        self._report.busy_s = self._round.server_s + self._round.average()
        self._now = self._round.averaged_at

    def finish(self) -> ServerReport:
        """Send the new model to all devices, unless they are drawn, and ask for traces; return the server's work."""
        number = self._group[0].epoch
        if not self._draws:
            self._distribute(self._group, number)
        self._report.seconds, self._began_at = self._now - self._began_at, self._now
        assert self._round is not None
        spans = _by_device(self._round.spans)
        self._report.spans = spans.pop("")
        for party in self._group:
            party.wait_for(party.down.send(self._now, number + 1, 0), "round")
            if party.watched:
                party.add_spans(spans.get(party.member.name, ()))
            party.report()
        return self._report

    def stop(self) -> None:
        """End the training after its last round."""
        for party in self._group:
            party.down.send(self._now, party.epoch, 0)
        self._reports = self._take_reports()

    def reports(self) -> list[DeviceReport]:
        """Return what the devices of the round before report, or of the last one after `stop`."""
        reports, self._reports = self._reports, []
        return reports

    def _take_reports(self) -> list[DeviceReport]:
        since = 1 if self._draws else 0  # a device that is drawn gets the previous round's model in its own round
        return [
            DeviceReport(
                *party.traces(), *(way.take(party.epoch, party.epoch - since) for way in (party.up, party.down))
            )
            for party in self._group
        ]

    # --- messages of the server

    def _distribute(self, group: Iterable[Party], epoch: int) -> None:
        """Send each device its part of the global model; each split point is packed once."""
        packed: set[tuple[int, bool, bool]] = set()
        for party in group:
            p, member = party.plan.split_point, party.member
            changes = party.installed == (epoch - 1, p) and self._fleet.sends_changes(member, member.link.down_bps)
            frozen = party.installed is None or party.installed[1] != p
            form = "changes" if changes else "raw"
            if (p, changes, frozen) not in packed:
                packed.add((p, changes, frozen))
                self._work("pack", Work("pack", size_bytes=self._part_bytes(p, frozen=frozen), encoding=form))
            size = self._profile.exchanged_bytes(p, changes=changes)
            if frozen and not changes:
                size = self._part_bytes(p, frozen=True)
            party.wait_for(party.down.send(self._now, epoch, size, "model"), "model")
            if self._draws and party.epoch == epoch > 0:
                party.down.sends_after(party.reported_at, epoch, size)
            party.installed = (epoch, p)
            size = self._part_bytes(p, frozen=False) if changes else size
            party.compute(member.costs.seconds(Work("install", size_bytes=size, encoding=form)), "install")

    def _part_bytes(self, split_point: int, *, frozen: bool) -> int:
        of = self._profile.parameter_bytes if frozen else self._profile.changing_bytes
        return of(1, split_point)

    def _work(self, kind: str, work: Work) -> None:
        """Let a core of the server work, while all others are free; it is part of the round if one has been trained."""
        begin = self._now
        self._now += self._server.seconds(work)
        if self._round is not None:
            self._report.busy_s += self._now - begin
            self._round.add_server_span(kind, begin, self._now)
        elif self._lanes is not None:
            self._lanes.take(self._now)


def _by_device(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Return the spans of each device's own lanes and link, and as those of "" the server's."""
    found: dict[str, list[Span]] = {"": []}
    for span in spans:
        found.setdefault("" if span.owner == "server" else span.owner, []).append(span)
    return found
