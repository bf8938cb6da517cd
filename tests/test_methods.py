"""Plans as text, printed and parsed."""

from __future__ import annotations

import pytest

from pipar.errors import PlanError
from pipar.methods import Plan, check_plan


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(5, 1), "P=5 N=1"),
        (Plan(2, 12, 3), "P=2 N=12 1f1b(3)"),
        (Plan(1, 8, 0, "sparse-planes", "sparse-planes"), "P=1 N=8 sparse-planes"),
        (Plan(1, 8, 2, "sparse", "raw"), "P=1 N=8 1f1b(2) sparse/raw"),
    ],
)
def test_a_plan_parses_back_from_its_text(plan: Plan, text: str) -> None:
    assert str(plan) == text
    assert Plan.parse(text) == plan


def test_other_text_is_not_a_plan() -> None:
    with pytest.raises(PlanError, match="'P=2' is not a plan, such as"):
        Plan.parse("P=2")


@pytest.mark.parametrize("plan", [Plan(0, 1), Plan(3, 1), Plan(1, 0), Plan(1, 101)])
def test_a_plan_that_does_not_fit_is_refused(plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"(Split point [03]|(0|101) micro-batches) .*outside"):
        check_plan(plan, layers=2, batch_size=100, model="hand")
