"""Models are sent whole or as changes, depending on the links' rates and the machines' speeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipar.methods import METHODS
from pipar.planner.candidates import allowed_plans, needed_bytes
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet, Member
from pipar.profiling.profile import CodingTimes, LayerProfile, Profile
from pipar.settings.links import Link

LAYERS = tuple(LayerProfile(name, (0.1,), (0.2,), 1000, 40_000_000) for name in "ab")
#: Changes are half of a model's bytes, and take 4 + 2 ns per byte to find; half a byte is 4 bits.
TIMES = {"changes": CodingTimes(encode_s_per_byte=4e-9, decode_s_per_byte=2e-9)}
PROFILE = Profile("any", "float32", (10,), LAYERS, coding=TIMES, changes_share=0.5)
SLOW, FAST = Link(up_bps=10e6, down_bps=10e6), Link(up_bps=1e9, down_bps=1e9)


def fleet(link: Link = SLOW, *, speed: float = 1.0, method: str = "pipar", encoding: str = "auto") -> Fleet:
    member = Member("pi", Costs(PROFILE, speed), link, 20, encoding=encoding)
    return Fleet(METHODS[method], (member,), Costs(PROFILE), 1, 10)


def below_bps(of: Fleet) -> float:
    return of.changes_below_bps(of.members[0])


def test_changes_are_sent_below_the_rate_at_which_they_take_as_long_as_the_model() -> None:
    assert below_bps(fleet()) == pytest.approx(4 / 6e-9)
    assert below_bps(fleet(speed=0.1)) == pytest.approx(4 / 42e-9)  # up: the device finds them, ten times as slowly
    one = fleet()
    assert one.sends_changes(one.members[0], 600e6)
    assert not one.sends_changes(one.members[0], 700e6)
    assert not one.sends_changes(one.members[0], None)


def test_the_server_decodes_the_parts_of_many_devices_on_all_its_cores() -> None:
    few = fleet()
    (member,) = few.members
    many = replace(few, members=tuple(replace(member, name=f"pi-{n}") for n in range(8)))
    assert below_bps(many) == pytest.approx(4 / (4e-9 + 8 * 2e-9))
    assert below_bps(replace(many, cores=4)) == pytest.approx(4 / (4e-9 + 2 * 2e-9))
    assert below_bps(replace(many, cores=16)) == pytest.approx(below_bps(few))


def test_models_are_sent_whole_if_configured_or_if_changes_were_not_measured() -> None:
    assert below_bps(fleet(encoding="raw")) == 0
    assert below_bps(fleet(method="sl")) == 0
    server = Costs(replace(PROFILE, coding={}))
    assert below_bps(replace(fleet(), server=server)) == 0
    assert below_bps(replace(fleet(), server=Costs(replace(PROFILE, changes_share=1.0)))) == 0


def test_with_noise_models_are_sent_whole_and_the_last_one_is_kept_for_clipping() -> None:
    one = replace(fleet(FAST), protects=True)
    assert below_bps(replace(fleet(SLOW), protects=True)) == 0
    assert one.keeps_base(one.members[0])
    assert not fleet(FAST).keeps_base(one.members[0])


@pytest.mark.parametrize(
    ("link", "kept"),
    [
        (SLOW, True),
        (FAST, False),
        (Link(), False),
        (Link(up_bps=1e9, down_bps=10e6), True),
        (Link.changing([FAST, SLOW], 60), True),
    ],
    ids=str,
)
def test_a_base_is_kept_where_any_of_the_rates_is_slow(link: Link, kept: bool) -> None:
    one = fleet(link)
    assert one.keeps_base(one.members[0]) is kept
    real = replace(one, real_links=True)
    assert real.keeps_base(real.members[0])  # its rate is unknown


def test_plans_count_the_memory_of_a_kept_model() -> None:
    slow, fast = fleet(SLOW), fleet(FAST)
    plan = allowed_plans(fast, fast.members[0])[0]
    needed = needed_bytes(fast, fast.members[0], plan)
    assert needed_bytes(slow, slow.members[0], plan) == needed + 40_000_000 * plan.split_point
