"""Every release is counted, by the server and by the device, and none is sent beyond the budget."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.cutting import Loss
from support.server_world import (
    EPOCH_BY_HAND,
    Outcome,
    by_hand,
    end_epoch,
    hello,
    honest,
    roaming,
    scripted,
    train,
    until,
)
from support.small_runs import SETTINGS

import pipar
from pipar.errors import BudgetSpentError, ConfigError, InputError, PrivacyError, ProtocolError, TrainingError
from pipar.events import BudgetSpent, Dropped, Event, Lost, RoundOver, Trained
from pipar.execution.spans import UPLINK
from pipar.launch.run import with_method
from pipar.methods import Plan
from pipar.monitoring.event_text import EventDescriber
from pipar.privacy import accounting
from pipar.privacy.accounting import budget, cost, epsilon_after
from pipar.privacy.budget import (
    AllowedCuts,
    BudgetUse,
    PrivacyAccountant,
    PrivacyGuard,
    PrivacyLimits,
    UpdateNoise,
    choose_noise,
)
from pipar.settings.config_file import config_from
from pipar.storage.checkpoint import Checkpoint, Checkpoints, identity_of, latest, read
from pipar.transport.channel import Channel
from pipar.wire.messages import EMPTY, Kind, Message
from pipar.wire.orders import Orders

DELTA = 1e-5
NO_LIMIT = UpdateNoise(1.0, 4.0, DELTA)


def limited(releases: int, multiplier: float = 4.0) -> UpdateNoise:
    """Return noise whose budget allows this number of releases."""
    target = epsilon_after(multiplier, releases, DELTA) * (1 + 1e-9)
    return UpdateNoise(1.0, multiplier, DELTA, target, budget(target, DELTA))


def releases(outcome: Outcome) -> dict[str, int]:
    return {name: outcome.accountant.of(name).releases for name in ("a", "b")}


# --- the configuration


def test_a_target_alone_chooses_noise_that_lasts_for_all_epochs() -> None:
    terms = choose_noise(config_from({"run": {"epochs": 7}, "privacy": {"target_epsilon": 3.0, "clip": 0.5}}))
    assert terms is not None
    spent = BudgetUse()
    for _ in range(7):
        assert terms.allow(spent)
        spent = spent.plus(terms.multiplier)
    assert not terms.allow(spent)
    assert accounting.epsilon(spent.mu_squared, DELTA) == pytest.approx(3.0, rel=1e-6)


def test_without_noise_nothing_is_counted_and_no_accountant_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "find_spec", lambda _: None)
    assert choose_noise(config_from({"privacy": {"pixel_epsilon": 1.0, "label_epsilon": 1.0}})) is None
    accountant = PrivacyAccountant(None)
    accountant.note("a")
    assert (accountant.epsilons(), accountant.largest_epsilon(), accountant.as_result()) == ({}, None, None)
    with pytest.raises(accounting.NoAccountantError, match="dp-accounting"):
        choose_noise(config_from({"privacy": {"noise_multiplier": 1.0}}))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"run": {"method": "sl"}, "privacy": {"noise_multiplier": 1.0}}, "fl, sfl and pipar, but run.method is 'sl'"),
    ({"run": {"method": "sfl2"}, "privacy": {"target_epsilon": 1.0}}, "fl, sfl and pipar, but run.method is 'sfl2'"),
    (
        {"optimizer": {"state_at_aggregation": "keep"}, "privacy": {"noise_multiplier": 1.0}},
        "optimiser state of layers that change sides would be sent without noise",
    ),
    ({"privacy": {"pixel_epsilon": 1.5}}, "privacy.pixel_epsilon = 1.5 is not allowed"),
    ({"privacy": {"noise_multiplier": 1e-160}}, "privacy.noise_multiplier = 1e-160 is not allowed"),
    ({"privacy": {"noise_multiplier": 1.0, "clip": 1e-320}}, "is not allowed: give a number from 1e-100 to 1e100"),
    ({"privacy": {"target_epsilon": 1e200}}, "privacy.target_epsilon = 1e+200 is not allowed"),
]


@pytest.mark.parametrize(("tree", "sentence"), REFUSED, ids=["sl", "sfl2", "state", "pixel", "noise", "clip", "target"])
def test_settings_that_cannot_be_private_are_refused_in_one_sentence(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from(tree)
    assert sentence in str(refused.value)


def test_a_method_that_cannot_be_private_is_refused_in_a_comparison_too() -> None:
    with pytest.raises(ConfigError, match=r"run\.method is 'sl'"):
        with_method(config_from({"privacy": {"noise_multiplier": 1.0}}), "sl")


def test_a_budget_for_less_than_one_round_is_refused_with_the_noise_that_it_needs() -> None:
    config = config_from({"privacy": {"target_epsilon": 1.0, "noise_multiplier": 1.0}})
    with pytest.raises(ConfigError, match="does not allow a single round") as refused:
        choose_noise(config)
    needed = float(str(refused.value).split("at least ")[1].split(",")[0])
    assert choose_noise(config_from({"privacy": {"target_epsilon": 1.0, "noise_multiplier": needed}})) is not None


# --- counting


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.05, 200), min_size=1, max_size=30), st.floats(0.01, 200), st.integers(1, 300))
def test_no_device_exceeds_the_target_for_any_noise_and_number_of_rounds(
    multipliers: list[float], target: float, rounds: int
) -> None:
    """The noise may change, as it does when a training is resumed with another configuration."""
    guard = PrivacyGuard(1, PrivacyLimits(budget=budget(target, DELTA)))
    refused = math.inf
    for number in range(rounds):
        multiplier = multipliers[number % len(multipliers)]
        try:
            guard.note(multiplier)
        except BudgetSpentError:
            refused = min(refused, guard.used.mu_squared + cost(multiplier))
    assert accounting.epsilon(guard.used.mu_squared, DELTA) <= target
    if refused < math.inf:
        assert accounting.epsilon(refused, DELTA) > target * (1 - 1e-9)


def test_counts_are_restored_from_a_checkpoint(tmp_path: Path) -> None:
    accountant = PrivacyAccountant(limited(3))
    for device in ("a", "b", "a"):
        accountant.note(device)
    notes = {"spent": accountant.as_notes()}
    kept = read(Checkpoints(tmp_path / "kept").save(Checkpoint(2, EMPTY, {}, {}, {}, notes=notes)))
    again = PrivacyAccountant(limited(3))
    again.resume(kept.notes["spent"])
    assert again.epsilons() == accountant.epsilons()
    assert again.would_exceed(["a", "b"]) is None
    again.note("a")
    assert again.would_exceed(["b"]) is None
    device, epsilon = again.would_exceed(["a", "b"]) or ("", 0.0)
    assert device == "a"
    assert epsilon == pytest.approx(epsilon_after(4.0, 4, DELTA))


def test_the_larger_of_two_counts_holds() -> None:
    accountant = PrivacyAccountant(NO_LIMIT)
    accountant.note("a")
    accountant.learn("a", BudgetUse(3, 3 * cost(4.0)))
    accountant.learn("a", BudgetUse(2, 2 * cost(4.0)))
    assert accountant.of("a") == BudgetUse(3, 3 * cost(4.0))
    guard = PrivacyGuard(1)
    guard.note(4.0)
    guard.accept(4.0, BudgetUse(5, 5 * cost(4.0)))
    assert guard.used.releases == 5


def test_a_round_that_is_sent_twice_has_other_noise() -> None:
    guard = PrivacyGuard(1)
    first, unsent = guard.noise_source("pi", 4)("w").random(), guard.noise_source("pi", 4)("w").random()
    guard.note(4.0)
    assert first == unsent != guard.noise_source("pi", 4)("w").random()
    assert PrivacyGuard().noise_seed != PrivacyGuard().noise_seed  # random unless a test gives one


@pytest.mark.parametrize(
    ("guard", "ordered", "sentence"),
    [
        (PrivacyGuard(1, PrivacyLimits(least_multiplier=2.0)), 1.0, "needs at least 2"),
        (PrivacyGuard(1, PrivacyLimits(least_multiplier=2.0)), 0.0, "needs at least 2"),
        (PrivacyGuard(1, PrivacyLimits(budget=1.0)), 0.0, "needs some"),
    ],
)
def test_a_device_refuses_a_server_that_orders_too_little_noise(
    guard: PrivacyGuard, ordered: float, sentence: str
) -> None:
    with pytest.raises(TrainingError, match=sentence):
        guard.accept(ordered, BudgetUse())


def test_a_training_is_not_resumed_with_noise_where_there_was_none(tmp_path: Path) -> None:
    plain, private, more = ({}, {"noise_multiplier": 1.0}, {"target_epsilon": 3.0})
    identities = [identity_of(config_from({"privacy": section})) for section in (plain, private, more)]
    Checkpoints(tmp_path).save(Checkpoint(1, EMPTY, identities[0], {}, {}))
    with pytest.raises(InputError, match=r"noise on updates, by \[privacy\], was false"):
        latest(tmp_path, identities[1], pytest.fail)
    assert identities[1] == identities[2]  # how much noise there is may change


def test_orders_that_combine_noise_with_momentum_are_refused() -> None:
    orders = Orders(1, Plan(1, 1), 2, 10, False, True, noise_multiplier=1.0)
    with pytest.raises(ProtocolError, match="optimiser state that moves with layers"):
        Orders.read(Message(Kind.WELCOME, body=orders.to_body()))
    assert Orders.read(Message(Kind.WELCOME, body=replace(orders, keep_state=False).to_body())).protects


# --- the programs, in virtual time


@pytest.mark.parametrize("method", ["fl", "sfl", "pipar"])
def test_every_round_costs_every_device_one_release(method: str) -> None:
    outcome = train([honest("a"), honest("b")], method=method, epochs=3, terms=NO_LIMIT)
    assert outcome.failure is None
    assert releases(outcome) == {"a": 3, "b": 3}
    expected = [epsilon_after(4.0, number, DELTA) for number in (1, 2, 3)]
    assert [result.epsilon for result in outcome.results] == pytest.approx(expected)
    assert [event.epsilon for event in outcome.of(RoundOver)] == [{"a": one, "b": one} for one in expected]
    assert [span.owner for span in outcome.spans if span.kind == "protect"] == ["a", "b"] * 3


def test_training_ends_before_a_round_that_would_exceed_the_budget_and_says_so() -> None:
    terms = limited(2)
    outcome = train([honest("a"), honest("b")], epochs=5, terms=terms)
    assert outcome.failure is None
    assert outcome.lives == [None, None]
    assert len(outcome.results) == 2
    (stopped,) = outcome.of(BudgetSpent)
    assert (stopped.epoch, stopped.device) == (2, "a")
    assert terms.target_epsilon is not None
    assert outcome.results[-1].epsilon <= terms.target_epsilon < stopped.epsilon
    assert EventDescriber().sentence(stopped) == (
        f"Training ended after epoch 2: one more would bring a to epsilon {stopped.epsilon:.4g}, and "
        f"privacy.target_epsilon is {terms.target_epsilon:g}."
    )


def test_a_round_of_a_device_that_is_lost_while_it_sends_counts() -> None:
    async def lost_after_its_epoch(channel: Channel) -> None:
        channel.post(hello("b"))
        await until(channel, Kind.ROUND)
        channel.post(end_epoch(loss_sum=1.0))
        await asyncio.sleep(1.0)

    outcome = train(
        [honest("a"), scripted(lost_after_its_epoch, "b")], method="fl", epochs=2, terms=NO_LIMIT, min_devices=1
    )
    assert [event.device for event in outcome.of(Dropped)] == ["b"]
    assert [sorted(counted) for counted in outcome.counted] == [["a"], ["a"]]
    assert releases(outcome) == {"a": 2, "b": 1}


def test_a_round_that_ends_without_a_device_costs_it_the_update_that_it_has_sent() -> None:
    """It is far too slow for the deadline; the update of its last round arrives late, and counts."""
    outcome = train([honest("a"), honest("b", speed=0.2)], method="fl", epochs=6, terms=NO_LIMIT, round_deadline_s=10.0)
    assert outcome.failure is None
    assert [sorted(counted) for counted in outcome.counted].count(["a"]) > 0
    assert releases(outcome)["a"] == 6
    assert releases(outcome)["b"] < 6


def test_frames_that_are_sent_again_over_another_connection_cost_nothing() -> None:
    guard = PrivacyGuard(1)
    lives = [honest("a"), roaming("b", 6, 9, loss=Loss.CLEAN, guard=guard)]
    outcome = train(lives, epochs=3, terms=NO_LIMIT, resume_window_s=30.0)
    assert outcome.failure is None
    assert releases(outcome) == {"a": 3, "b": 3}
    assert guard.used.releases == 3


@contextmanager
def updates_sent() -> Iterator[Counter[str]]:
    """Yield how many updates each device has begun to send, counted where they leave it."""
    sent: Counter[str] = Counter()
    post = Channel.post

    def counting(channel: Channel, message: Message) -> None:
        if channel._lane == UPLINK and message.kind is Kind.MODEL:
            sent[channel._recorder.owner] += 1
        post(channel, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "post", counting)
        yield sent


#: What happens to a device: the number of frames after which each of its links is lost, and how; how fast it is, how
#: long it stays away, and when it starts.
FATES = st.fixed_dictionaries(
    {
        "cuts": st.lists(st.integers(3, 40), max_size=4),
        "loss": st.sampled_from(Loss),
        "speed": st.sampled_from([1.0, 0.3, 0.1]),
        "pause_s": st.sampled_from([0.5, 3.0, 20.0]),
        "starts_s": st.sampled_from([0.0, 7.0]),
    }
)
SERVERS = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["fl", "sfl", "pipar"]),
        "epochs": st.integers(1, 6),
        "round_deadline_s": st.sampled_from([None, 3.0, 8.0, 15.0]),
        "resume_window_s": st.sampled_from([0.0, 2.0, 30.0]),
        "begin_with": st.sampled_from([1, 2]),
    }
)
PLAIN = {"cuts": [], "loss": Loss.CLEAN, "speed": 1.0, "pause_s": 0.5, "starts_s": 0.0}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.tuples(FATES, FATES), SERVERS)
@example(  # the round ends without a device that has announced the end of its epoch but not sent its update yet
    1,
    (PLAIN, PLAIN),
    {"method": "sfl", "epochs": 1, "round_deadline_s": 3.0, "resume_window_s": 0.0, "begin_with": 1},
)
def test_no_device_exceeds_its_budget_however_often_it_is_lost_late_or_sends_again(
    allowed: int, fates: tuple[dict[str, Any], dict[str, Any]], server: dict[str, Any]
) -> None:
    terms = limited(allowed)
    guards = {name: PrivacyGuard(1, PrivacyLimits(budget=terms.budget)) for name in ("a", "b")}
    lives = [
        roaming(name, *fate["cuts"], **{key: fate[key] for key in fate if key != "cuts"}, proved=True, guard=guard)
        for (name, guard), fate in zip(guards.items(), fates, strict=True)
    ]
    with updates_sent() as sent:
        outcome = train(lives, terms=terms, **server)
    assert outcome.failure is None
    assert all(sent[name] <= guard.used.releases <= allowed for name, guard in guards.items())
    assert all(count <= guards[name].used.releases for name, count in releases(outcome).items())
    assert all(result.epsilon <= terms.target_epsilon for result in outcome.results)


def test_a_device_corrects_the_count_of_a_server_that_has_lost_it() -> None:
    guard = PrivacyGuard(1)
    guard.accept(4.0, BudgetUse(3, 3 * cost(4.0)))  # by a server that then lost its last round
    outcome = train([honest("a"), honest("b", guard=guard)], epochs=4, terms=limited(5))
    assert [sorted(counted) for counted in outcome.counted] == [["a", "b"], ["a", "b"], ["a"], ["a"]]
    assert releases(outcome) == {"a": 4, "b": 5}
    assert not outcome.of(BudgetSpent)  # what a device says of itself does not end the training of the others
    assert isinstance(outcome.lives[1], BudgetSpentError)
    (lost,) = outcome.of(Lost)
    assert "'b' has used its privacy budget: one more update would bring it to epsilon" in lost.reason


@pytest.mark.parametrize("begin_with", [1, 2])
def test_a_claim_of_a_spent_budget_costs_only_the_device_that_makes_it(begin_with: int) -> None:
    async def liar(channel: Channel) -> None:
        channel.post(hello("b", releases=1000, spent=1e9))
        await until(channel, Kind.STOP)

    honest_ones = [honest("a"), honest("c", starts_s=5.0)]
    outcome = train(
        [scripted(liar, "b"), *honest_ones], devices=("a", "b", "c"), begin_with=begin_with, epochs=3, terms=limited(3)
    )
    assert outcome.failure is None
    assert "'b' has used its privacy budget" in str(outcome.lives[0])
    assert len(outcome.results) == 3
    assert releases(outcome)["a"] == 3
    assert not outcome.of(BudgetSpent)
    assert outcome.accountant.of("b").releases == 0


def test_training_ends_when_every_device_of_it_has_spent_its_budget_by_its_own_count() -> None:
    guards = [PrivacyGuard(1), PrivacyGuard(2)]
    for guard, used in zip(guards, (3, 4), strict=True):
        guard.accept(4.0, BudgetUse(used, used * cost(4.0)))
    lives = [honest(name, guard=guard) for name, guard in zip("ab", guards, strict=True)]
    outcome = train(lives, epochs=9, terms=limited(5))
    assert outcome.failure is None
    assert [sorted(counted) for counted in outcome.counted] == [["a", "b"], ["a"]]
    assert [event.device for event in outcome.of(BudgetSpent)] == ["a"]


def test_training_ends_when_too_few_devices_of_a_closed_fleet_have_budget_left() -> None:
    guard = PrivacyGuard(1)
    guard.accept(4.0, BudgetUse(3, 3 * cost(4.0)))
    outcome = train([honest("a"), honest("b", guard=guard)], epochs=4, terms=limited(5), min_devices=2)
    assert len(outcome.results) == 2
    assert [event.device for event in outcome.of(BudgetSpent)] == ["b"]


def test_a_device_that_joins_without_budget_gets_that_reason_and_not_the_end_of_the_training() -> None:
    terms = limited(2)
    guard = PrivacyGuard(1, PrivacyLimits(budget=terms.budget, delta=DELTA), used=BudgetUse(2, 2 * cost(4.0)))
    outcome = train([honest("a"), honest("b", guard=guard)], begin_with=1, epochs=2, terms=terms)
    assert outcome.failure is None
    assert outcome.counted == [{"a": 20}, {"a": 20}]
    assert outcome.lives[0] is None
    assert isinstance(outcome.lives[1], BudgetSpentError)
    assert (
        "has sent 2 updates (epsilon 4.38 in total), and one more would exceed its privacy budget of 4.38 (delta 1e-05)"
    ).replace("4.38", f"{epsilon_after(4.0, 2, DELTA):.4g}") in str(outcome.lives[1])


def test_a_device_reports_its_epsilon_and_its_target_after_each_round() -> None:
    events: list[Event] = []
    guard = PrivacyGuard(1, PrivacyLimits(delta=DELTA))
    train([honest("a", guard=guard, observe=events.append), honest("b")], epochs=2, terms=limited(4))
    told = [event for event in events if isinstance(event, Trained)]
    spent = [epsilon_after(4.0, number, DELTA) for number in (1, 2, 4)]
    assert [(event.epsilon, event.target) for event in told] == [
        (pytest.approx(one), pytest.approx(spent[2])) for one in spent[:2]
    ]
    assert EventDescriber().sentence(told[1]).endswith(f"samples, epsilon {spent[1]:.4g} of {spent[2]:.4g} spent")


def test_a_device_that_cannot_compute_epsilon_still_counts_its_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "find_spec", lambda _: None)
    guard = PrivacyGuard(1, PrivacyLimits(budget=cost(4.0), delta=DELTA))
    guard.accept(4.0, BudgetUse())
    guard.note(4.0)
    assert (guard.epsilon, guard.target_epsilon) == (None, None)
    with pytest.raises(
        BudgetSpentError, match="has sent 1 update, and one more would exceed its privacy budget, so it stops"
    ):
        guard.check(4.0)


def test_a_device_refuses_to_send_beyond_its_own_budget_under_any_orders() -> None:
    guard = PrivacyGuard(1, PrivacyLimits(budget=2 * cost(4.0)))
    outcome = train([honest("a"), honest("b", guard=guard)], epochs=4, terms=NO_LIMIT)
    assert outcome.failure is None
    assert isinstance(outcome.lives[1], BudgetSpentError)
    assert [sorted(counted) for counted in outcome.counted] == [["a", "b"]] * 2 + [["a"]] * 2
    assert guard.used.releases == 2
    assert any("would exceed its privacy budget" in event.reason for event in outcome.of(Dropped))


def test_the_servers_budget_holds_for_a_device_without_its_own() -> None:
    """The server may not know yet of all updates that the device has sent."""
    guard = PrivacyGuard(1)
    guard.accept(4.0, BudgetUse(), 2 * cost(4.0))
    guard.note(4.0)
    guard.accept(4.0, BudgetUse(), 2 * cost(4.0))
    guard.note(4.0)
    with pytest.raises(BudgetSpentError, match="has sent 2 updates"):
        guard.check(4.0)
    guard.accept(4.0, BudgetUse())  # another server's training, without a budget
    guard.check(4.0)


@pytest.mark.parametrize("said", [{"releases": -1, "spent": 1.0}, {"releases": 1, "spent": "much"}, {"spent": 1e999}])
def test_a_count_that_is_not_a_number_breaks_the_protocol(said: dict[str, Any]) -> None:
    async def liar(channel: Channel) -> None:
        channel.post(hello("b", **said))
        await until(channel, Kind.STOP)

    outcome = train([honest("a"), scripted(liar), honest("b", starts_s=1.0)], terms=NO_LIMIT)
    assert outcome.failure is None
    assert isinstance(outcome.lives[1], TrainingError)


def test_a_stranger_cannot_change_the_count_of_a_device() -> None:
    async def stranger(channel: Channel) -> None:
        await asyncio.sleep(1.0)
        channel.post(hello("b", releases=1000, spent=1e9))
        await until(channel, Kind.STOP)

    outcome = train([honest("a"), honest("b"), scripted(stranger)], epochs=2, terms=limited(2))
    assert outcome.failure is None
    assert isinstance(outcome.lives[2], TrainingError)
    assert len(outcome.results) == 2
    assert releases(outcome) == {"a": 2, "b": 2}


FEDERATED = AllowedCuts(2, frozenset([2]), "by its own configuration no activations leave this device")


def test_a_device_of_federated_learning_sends_no_activations_under_any_orders() -> None:
    refusing = honest("b", guard=PrivacyGuard(1, PrivacyLimits(cuts=FEDERATED)))
    outcome = train([honest("a"), refusing], method="pipar", terms=NO_LIMIT)
    assert isinstance(outcome.lives[1], PrivacyError)
    assert [sorted(counted) for counted in outcome.counted] == [["a"]]
    assert any("no activations leave this device" in event.reason for event in outcome.of(Lost))
    assert train([honest("a"), refusing], method="fl", terms=NO_LIMIT).lives == [None, None]


@pytest.mark.parametrize(("split_point", "layers"), [(1, 2), (2, 3), (3, 3)])
def test_a_device_refuses_a_cut_that_it_does_not_allow(split_point: int, layers: int) -> None:
    with pytest.raises(PrivacyError, match="start both with the same configuration"):
        PrivacyGuard(1, PrivacyLimits(cuts=FEDERATED)).accept_cut(split_point, layers)


def test_a_new_plan_is_checked_like_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipar.planner.replanner.NOTICED", -1.0)  # every round gets a new plan
    late = AllowedCuts(2, frozenset([1]), "that cut leaks too much")

    async def replan(_: Any) -> dict[str, Plan]:
        return {"a": Plan(2, 1), "b": Plan(2, 1)}

    lives = [honest("a"), honest("b", guard=PrivacyGuard(1, PrivacyLimits(cuts=late)))]
    outcome = train(lives, epochs=3, terms=NO_LIMIT, replan=replan)
    assert outcome.lives[0] is None
    assert isinstance(outcome.lives[1], PrivacyError)


# --- a run


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[pipar.launch.run.Result, list[Event]]:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path))
    events: list[Event] = []
    result = pipar.run(None, world="timing-only", settings=[*SETTINGS, *more], observe=events.append)
    return result, events


@pytest.mark.slow
def test_a_timing_only_run_counts_epsilon_and_stops_at_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = epsilon_after(4.0, 3, DELTA) * 1.01
    settings = ("run.epochs=9", "privacy.noise_multiplier=4.0", f"privacy.target_epsilon={target}")
    result, events = run(tmp_path, monkeypatch, *settings)
    (stopped,) = (event for event in events if isinstance(event, BudgetSpent))
    written = json.loads((result.folder / "result.json").read_text())
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    expected = [epsilon_after(4.0, number, DELTA) for number in (1, 2, 3)]
    assert [row["epsilon"] for row in rows] == [row["epsilon"] for row in written["epochs"]] == pytest.approx(expected)
    assert written["epsilon"] == pytest.approx(expected[-1])
    assert written["stopped"] == stopped.reason
    assert written["privacy"]["devices"] == [
        {"device": f"device-{number}", "releases": 3, "epsilon": pytest.approx(expected[-1])} for number in (1, 2, 3)
    ]


@pytest.mark.slow
def test_a_run_without_noise_has_no_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = run(tmp_path, monkeypatch)
    assert [result.content[key] for key in ("epsilon", "privacy", "stopped")] == [None] * 3
    assert [epoch["epsilon"] for epoch in result.epochs] == [None] * 2


def test_an_impossible_budget_is_found_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="does not allow a single round"):
        run(tmp_path, monkeypatch, "privacy.target_epsilon=0.1", "privacy.noise_multiplier=1.0")
    assert list(tmp_path.iterdir()) == []
    assert math.isinf(PrivacyGuard()._budget)


def test_a_training_ends_when_no_device_that_is_here_has_budget_left() -> None:
    """A device that has left may have some: nothing waits for it."""
    leaver = by_hand(*EPOCH_BY_HAND, name="c", leaves=True)
    outcome = train(
        [honest("a"), honest("b"), leaver], devices=("a", "b", "c"), epochs=9, terms=limited(3), stops_at_s=1e5
    )
    assert outcome.failure is None
    assert len(outcome.counted) == 3
    assert [event.device for event in outcome.of(BudgetSpent)] == ["a"]
