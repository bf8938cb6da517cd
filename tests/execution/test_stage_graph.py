"""The stage graph is the paper's table, and the recursion over it behaves as a schedule must."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recursion import KINDS, all_stages, end_times, following, parse, previous

from pipar.execution.stage_graph import DATA_FROM, Stage

# Paper III-C, table of stages, typed row by row: stage | previous | next, with n = 3 as the row 1 < n < N and
# N = 5. One correction: the next stage of f_s n is b_s n; the paper prints b_s n+1.
TABLE = """
fc1 |         | fc2 u1
fc3 | fc2     | fc4 u3
fc5 | fc4     | bc1 u5
u1  | fc1     | u2 fs1
u3  | u2 fc3  | u4 fs3
u5  | u4 fc5  | fs5
fs1 | u1      | bs1
bs1 | fs1     | fs2 d1
fs3 | u3 bs2  | bs3
bs3 | fs3     | fs4 d3
fs5 | u5 bs4  | bs5
bs5 | fs5     | d5
d1  | bs1     | d2 bc1
d3  | d2 bs3  | d4 bc3
d5  | d4 bs5  | bc5
bc1 | fc5 d1  | bc2
bc3 | bc2 d3  | bc4
bc5 | bc4 d5  |
"""
ROWS = [[cell.split() for cell in line.split("|")] for line in TABLE.strip().splitlines()]

micro_batches = st.integers(1, 12)
seconds = st.integers(0, 50).map(float)


@st.composite
def timed_iterations(draw: st.DrawFn) -> tuple[int, dict[Stage, float]]:
    n = draw(micro_batches)
    return n, {stage: draw(seconds) for stage in all_stages(n)}


@pytest.mark.parametrize(("stage", "before", "after"), ROWS, ids=lambda cell: "-".join(cell) or "none")
def test_a_stage_has_the_previous_and_next_stages_of_the_papers_table(
    stage: list[str], before: list[str], after: list[str]
) -> None:
    one = parse(stage[0])
    assert {str(needed) for needed in previous(one, 5)} == set(before)
    assert {str(later) for later in following(one, 5)} == set(after)


def test_with_one_micro_batch_the_six_stages_are_a_chain_and_the_backward_also_waits_for_its_own_forward() -> None:
    assert [str(stage) for stage in all_stages(1)] == ["fc1", "u1", "fs1", "bs1", "d1", "bc1"]
    assert set(previous(Stage("bc", 1), 1)) == {Stage("fc", 1), Stage("d", 1)}


def test_first_backward_waits_for_last_forward_even_if_its_gradient_came_early() -> None:
    ends = end_times(4, lambda stage: 10.0 if stage.kind == "fc" else 1.0)
    assert ends[Stage("d", 1)] == 14.0
    assert ends[Stage("bc", 1)] == 41.0


@given(micro_batches)
def test_every_stage_is_listed_once_and_after_all_it_waits_for(n: int) -> None:
    order = all_stages(n)
    assert len(order) == len(set(order)) == 6 * n
    for place, stage in enumerate(order):
        assert set(previous(stage, n)) <= set(order[:place])


@pytest.mark.slow
@given(micro_batches)
def test_next_is_the_inverse_of_previous(n: int) -> None:
    edges = {(before, stage) for stage in all_stages(n) for before in previous(stage, n)}
    assert edges == {(stage, after) for stage in all_stages(n) for after in following(stage, n)}


@pytest.mark.slow
@given(timed_iterations())
def test_each_stage_ends_its_own_time_after_the_last_it_waits_for(iteration: tuple[int, dict[Stage, float]]) -> None:
    n, times = iteration
    ends = end_times(n, times.__getitem__)
    for stage in all_stages(n):
        assert ends[stage] == times[stage] + max([0.0, *(ends[before] for before in previous(stage, n))])


@pytest.mark.slow
@given(timed_iterations())
def test_no_lane_runs_two_stages_at_the_same_time(iteration: tuple[int, dict[Stage, float]]) -> None:
    n, times = iteration
    ends = end_times(n, times.__getitem__)
    for lane in (("fc", "bc"), ("u",), ("fs", "bs"), ("d",)):
        spans = sorted((ends[stage] - times[stage], ends[stage]) for stage in ends if stage.kind in lane)
        assert all(start >= end for (_, end), (start, _) in pairwise(spans))


@pytest.mark.slow
@given(timed_iterations(), st.data())
def test_a_slower_stage_never_makes_any_stage_end_earlier(
    iteration: tuple[int, dict[Stage, float]], data: st.DataObject
) -> None:
    n, times = iteration
    slow = data.draw(st.sampled_from(all_stages(n)))
    before = end_times(n, times.__getitem__)
    after = end_times(n, {**times, slow: times[slow] + 7.0}.__getitem__)
    assert all(before[stage] <= after[stage] <= before[stage] + 7.0 for stage in before)


@pytest.mark.slow
@given(timed_iterations())
def test_the_last_backward_ends_the_iteration(iteration: tuple[int, dict[Stage, float]]) -> None:
    n, times = iteration
    ends = end_times(n, times.__getitem__)
    assert ends[Stage("bc", n)] == max(ends.values())


@given(st.sampled_from(KINDS), st.integers(1, 10**6))
def test_a_stage_prints_as_text_that_parses_back(kind: str, n: int) -> None:
    stage = Stage(kind, n)
    assert parse(str(stage)) == stage


def test_a_stage_prints_short() -> None:
    assert str(Stage("fc", 3)) == "fc3"


def test_the_data_of_each_stage_comes_from_the_stage_that_the_papers_table_names() -> None:
    """Between two stages of the paper, data passes only stages that the paper leaves out."""

    def papers_sources(kind: tuple[str, str]) -> set[str]:
        before = DATA_FROM.get(kind, ())
        return {source for one in before for source in ({one[1]} if one[1] in KINDS else papers_sources(one))}

    of_the_paper = {kind: papers_sources(kind) for kind in DATA_FROM if kind[1] in KINDS}
    assert {name: sources for (_, name), sources in of_the_paper.items()} == {
        one.kind: {before.kind for before in previous(one, 5) if before.micro_batch == 3}
        for one in all_stages(5)
        if one.micro_batch == 3
    }
