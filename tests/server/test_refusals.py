"""Refused devices are reported with name and reason, at a bounded rate and length."""

from __future__ import annotations

import asyncio

from support.server_world import World, honest, train

from pipar.events import Event, Refused
from pipar.execution.clock import run_virtually
from pipar.server import refusals
from pipar.server.refusals import RefusalReporter


def reported(*waits_and_reasons: tuple[float, str], device: str = "pi-9") -> list[Refused]:
    """Return what is reported of these refusals, each after its wait in seconds."""
    seen: list[Event] = []

    async def refuse_all() -> None:
        reporter = RefusalReporter(seen.append)
        for wait_s, reason in waits_and_reasons:
            await asyncio.sleep(wait_s)
            reporter.report(device, reason, again=False)

    run_virtually(refuse_all())
    return [event for event in seen if isinstance(event, Refused)]


def test_the_same_refusal_is_reported_once_a_minute() -> None:
    found = reported((0, "A."), (1, "A."), (58, "A."), (2, "A."), (1, "A."))
    assert found == [Refused("pi-9", "A.")] * 2


def test_another_number_is_not_another_reason() -> None:
    assert reported((0, "It reports 3 samples."), (0, "It reports 44 samples.")) == [
        Refused("pi-9", "It reports 3 samples.")
    ]


def test_other_reasons_are_reported_at_once() -> None:
    assert [event.reason for event in reported((0, "A."), (0, "B."), (0, "A."))] == ["A.", "B."]


def test_texts_of_a_peer_are_cut() -> None:
    (found,) = reported((0, "x" * 900_000), device="y" * 900_000)
    assert len(found.device) == len(found.reason) == 304


def test_many_different_refusals_need_no_more_memory() -> None:
    async def refuse_many() -> RefusalReporter:
        reporter = RefusalReporter(lambda _: None)
        for number in range(300):
            reporter.report("pi-9", "x" * number, again=False)
        return reporter

    found: list[RefusalReporter] = []

    async def main() -> None:
        found.append(await refuse_many())

    run_virtually(main())
    assert len(found[0]._reported) == refusals._MOST_REMEMBERED


def test_connections_that_are_refused_before_they_say_who_they_are_are_reported_by_their_address() -> None:
    async def knock(world: World) -> None:
        for port in (5123, 5124):
            world.server.report_refused(f"ipv4:10.0.0.9:{port}", "The token is not known.")
        for origin in ("ipv6:[::1]:5125", "ipv6:%5B::1%5D:51542"):
            world.server.report_refused(origin, "The token is not known.")

    outcome = train([("nobody", knock), honest("a")], devices=("a",))
    refused = [(event.device, event.reason) for event in outcome.of(Refused)]
    assert refused == [(f"a device at {host}", "The token is not known.") for host in ("10.0.0.9", "[::1]")]


def test_a_connection_with_a_revoked_credential_is_reported_by_its_device() -> None:
    async def knock(world: World) -> None:
        for port in (5123, 5124):
            world.server.report_refused(f"ipv4:10.0.0.9:{port}", "This certificate was revoked.", "pi-3")

    outcome = train([("revoked", knock), honest("a")], devices=("a",))
    refused = [(event.device, event.reason) for event in outcome.of(Refused)]
    assert refused == [("pi-3", "This certificate was revoked.")]
