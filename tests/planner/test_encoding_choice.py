"""Every plan has the exact encodings that transfer a micro-batch in the least time, chosen per direction."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pipar.execution.work import Work
from pipar.launch.sizes_only import SizesOnlyServerPart
from pipar.methods import METHODS, Plan
from pipar.planner.background_search import ReplanEncodings, search_again
from pipar.planner.candidates import allowed_plans, candidates
from pipar.planner.costs import Costs
from pipar.planner.encoding_choice import reencoded, with_encodings
from pipar.planner.fleet import Fleet, Member
from pipar.planner.paper_selection import estimate_plans
from pipar.profiling.profile import CodingTimes, LayerProfile, Profile
from pipar.settings.links import Link
from pipar.wire import encodings
from pipar.wire.frames import Assembler, cut_message
from pipar.wire.messages import Kind, Message

#: The shares that they leave after a ReLU, up and down, and roughly their times.
SHARES = {"sparse": (0.55, 0.5), "planes": (0.8, 0.85), "sparse-planes": (0.45, 0.4)}
CODING = {
    "sparse": CodingTimes(1e-5, 0.5e-9, 1e-5, 1.0e-9),
    "planes": CodingTimes(1e-5, 0.9e-9, 1e-5, 0.6e-9),
    "sparse-planes": CodingTimes(1e-5, 1.3e-9, 1e-5, 1.5e-9),
    "int8": CodingTimes(1e-5, 1.5e-9, 1e-5, 0.5e-9),
}
RELU = LayerProfile("relu", (0.01, 0.1), (0.02, 0.2), 100_000, 400, rectified=True, shares=SHARES)
SWISH = LayerProfile("hard-swish", (0.01, 0.1), (0.02, 0.2), 100_000, 400, shares=SHARES)
LAST = LayerProfile("last", (0.01, 0.1), (0.02, 0.2), 40, 400)
PROFILE = Profile("any", "float32", (1, 12), (RELU, SWISH, LAST), coding=CODING, decode_s_per_byte=1e-10)
SLOW, FAST, UNLIMITED = Link(up_bps=4e6, down_bps=8e6), Link(up_bps=3e9, down_bps=2e10), Link()


def fleet(
    link: Link, *, method: str = "pipar", device: Profile = PROFILE, encoding: str = "auto", speed: float = 1
) -> Fleet:
    member = Member("pi", Costs(device, speed), link, 24, encoding=encoding)
    return Fleet(METHODS[method], (member,), Costs(PROFILE), 1, 12)


def coded(of: Fleet, p: int, n: int = 2) -> tuple[str, str]:
    (plan,) = with_encodings(of, of.members[0], [Plan(p, n)])
    return plan.up, plan.down


def test_a_slow_link_gets_the_encoding_that_leaves_least_and_that_is_exact_at_its_cut() -> None:
    assert coded(fleet(SLOW), 1) == ("sparse-planes", "sparse-planes")
    assert coded(fleet(SLOW), 2) == ("planes", "planes")


def test_a_link_without_a_limit_and_one_that_is_faster_than_coding_get_raw() -> None:
    assert coded(fleet(UNLIMITED), 1) == ("raw", "raw")
    assert coded(fleet(Link(up_bps=4e6)), 1) == ("sparse-planes", "raw")
    # 3 Gbit/s are 2.7 ns per byte: sparse saves 1.2 of them and takes 1.5; at 2 Gbit/s it saves 1.8.
    assert coded(fleet(FAST), 1) == ("raw", "raw")
    assert coded(fleet(Link(up_bps=2e9)), 1) == ("sparse", "raw")


def test_the_whole_network_on_the_device_has_nothing_to_encode() -> None:
    assert coded(fleet(SLOW), 3, 1) == ("raw", "raw")


def test_every_chunk_of_a_large_tensor_costs_its_receiver_a_call() -> None:
    """6 samples of 100 kB are 3 chunks; at 1 Gbit/s planes save 0.96 ms of 4.8 and take 0.9 ms for their bytes."""
    link = Link(up_bps=1e9)
    for call_s, best in ((1e-5, "planes"), (4e-5, "raw")):
        coding = {"planes": CodingTimes(0.0, 0.9e-9, call_s, 0.6e-9)}
        server = Costs(replace(PROFILE, coding=coding))
        of = replace(fleet(link, device=replace(PROFILE, coding=coding)), server=server)
        assert coded(of, 2) == (best, "raw")


def test_a_device_that_codes_very_slowly_gets_raw() -> None:
    slow_coding = {
        name: replace(times, encode_s_per_byte=1e-5, decode_s_per_byte=1e-5) for name, times in CODING.items()
    }
    assert coded(fleet(SLOW, device=replace(PROFILE, coding=slow_coding)), 1) == ("raw", "raw")
    assert coded(fleet(SLOW, speed=1e-4), 1) == ("raw", "raw")


def test_an_encoding_that_was_not_measured_is_not_chosen() -> None:
    unmeasured = replace(PROFILE, coding={"planes": CODING["planes"]})
    assert coded(fleet(SLOW, device=unmeasured), 1) == ("planes", "planes")
    without_shares = replace(PROFILE, layers=tuple(replace(layer, shares={}) for layer in PROFILE.layers))
    assert coded(fleet(SLOW, device=without_shares), 1) == ("raw", "sparse-planes")


@pytest.mark.parametrize(
    ("given", "behind_a_relu", "elsewhere"),
    [
        ("raw", "raw", "raw"),
        ("sparse", "sparse", "raw"),
        ("planes", "planes", "planes"),
        ("sparse-planes", "sparse-planes", "planes"),
        ("int8", "int8", "int8"),
        ("topk", "topk", "topk"),
    ],
)
def test_a_configured_encoding_is_used_where_it_is_exact(given: str, behind_a_relu: str, elsewhere: str) -> None:
    for link in (SLOW, UNLIMITED):
        assert coded(fleet(link, encoding=given), 1) == (behind_a_relu,) * 2
        assert coded(fleet(link, encoding=given), 2) == (elsewhere,) * 2


def test_a_lossy_encoding_is_never_chosen_automatically() -> None:
    all_shares = {**SHARES, "int8": (0.1, 0.1)}
    layers = tuple(replace(layer, shares=all_shares) for layer in PROFILE.layers)
    assert coded(fleet(SLOW, device=replace(PROFILE, layers=layers)), 1)[0] in encodings.EXACT


def test_every_plan_that_is_allowed_has_its_encodings_and_each_p_and_n_comes_once() -> None:
    of = fleet(SLOW)
    plans = allowed_plans(of, of.members[0])
    assert len({(plan.split_point, plan.micro_batches) for plan in plans}) == len(plans)
    assert {plan.encoding for plan in plans if plan.split_point == 1} == {"sparse-planes"}
    assert {plan.encoding for plan in plans if plan.split_point == 2} == {"planes"}
    assert {plan.encoding for plan in plans if plan.split_point == 3} == {"raw"}


def test_the_least_time_of_a_plan_is_that_of_its_encoded_bytes() -> None:
    of, given = fleet(SLOW), fleet(SLOW, encoding="raw")

    def uplink_s(on: Fleet) -> float:
        only = replace(on.members[0], split_point=1, micro_batches=1)
        return candidates(on, only)[0].lane_s

    assert uplink_s(given) == 12 * 100_000 * 8 / 4e6
    assert uplink_s(of) == pytest.approx(0.45 * 12 * 100_000 * 8 / 4e6)


def test_the_papers_estimate_counts_the_bytes_that_are_sent() -> None:
    of, raw = fleet(SLOW, method="sfl"), fleet(SLOW, method="sfl", encoding="raw")
    only = [replace(each, members=(replace(each.members[0], split_point=1),)) for each in (of, raw)]
    (plan, with_coding), (_, without) = (estimate_plans(each)["pi"] for each in only)
    assert plan == Plan(1, 1, 0, "sparse-planes", "sparse-planes")
    assert with_coding < 0.6 * without


def test_encoding_is_in_chunks_and_raw_in_one_piece() -> None:
    assert PROFILE.chunk_bytes(1, 12, "raw") == [1_200_000]
    assert PROFILE.chunk_bytes(1, 12, "planes") == [200_000] * 6
    assert sum(PROFILE.chunk_bytes(1, 7, "planes")) == 700_000


def test_a_chunk_that_shrinks_to_nothing_counts_as_a_byte() -> None:
    """A frame of a coded tensor is never empty: the receiver would refuse it."""
    tiny = replace(RELU, output_bytes=4, shares={"planes": (0.01, 0.01)})
    profile = replace(PROFILE, layers=(tiny, LAST))
    assert profile.coded_bytes(1, 1, "up", "planes") == [1]
    (frame,) = cut_message(
        Message(Kind.GRADIENT, samples=1, body=SizesOnlyServerPart(profile, 1).encode(1, "planes", ())), 1, 1
    )
    assert Assembler().feed(frame) is not None


def test_costs_know_each_encoding_and_count_one_that_is_not_known_as_raw() -> None:
    costs = Costs(PROFILE, speed=0.5)
    assert costs.seconds(Work("encode", size_bytes=1000, encoding="planes")) == 2 * (1e-5 + 1000 * 0.9e-9)
    assert costs.seconds(Work("decode", size_bytes=1000, encoding="raw")) == 2 * (1000 * 1e-10)
    assert costs.seconds(Work("decode", size_bytes=1000, encoding="topk")) == 2 * (1000 * 1e-10)
    assert costs.coding_s("encode", "planes", 1000, 3) == pytest.approx(2 * (3e-5 + 1000 * 0.9e-9))


# --- when links change


def test_encodings_are_chosen_again_for_other_links() -> None:
    plans = {"pi": Plan(1, 2, 0, "raw", "raw")}
    assert reencoded(fleet(SLOW), plans) == {"pi": Plan(1, 2, 0, "sparse-planes", "sparse-planes")}
    assert reencoded(fleet(UNLIMITED), reencoded(fleet(SLOW), plans)) == plans
    assert reencoded(fleet(UNLIMITED, encoding="planes"), plans) == {"pi": Plan(1, 2, 0, "planes", "planes")}


def test_where_p_and_n_stay_a_changed_link_changes_only_the_encodings() -> None:
    before = {"pi": Plan(1, 2, 0, "raw", "raw")}
    again = ReplanEncodings(fleet(UNLIMITED), before)
    assert asyncio.run(again({"pi": SLOW})) == {"pi": Plan(1, 2, 0, "sparse-planes", "sparse-planes")}
    assert asyncio.run(again({"pi": UNLIMITED})) == before


def test_current_plans_that_stay_best_get_the_encodings_of_the_new_link() -> None:
    slow = fleet(SLOW)
    only = replace(slow, members=(replace(slow.members[0], split_point=1, micro_batches=2),))
    assert search_again(only, {"pi": Plan(1, 2)}) == {"pi": Plan(1, 2, 0, "sparse-planes", "sparse-planes")}
