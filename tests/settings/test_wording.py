"""The texts about a run's privacy and equivalence in tables and pages."""

from __future__ import annotations

from typing import Any

import pytest

from pipar.errors import ConfigError
from pipar.methods import Plan
from pipar.settings.config_file import config_from
from pipar.settings.wording import equivalence_text, plan_text, privacy_text, statistical_mark, whole_network_text


def spent(*of: tuple[int, float]) -> dict[str, Any]:
    devices = [
        {"device": f"d{k}", "releases": releases, "epsilon": epsilon} for k, (releases, epsilon) in enumerate(of)
    ]
    return {"clip": 0.5, "noise_multiplier": 4.0, "delta": 1e-5, "target_epsilon": 8.0, "devices": devices}


def test_a_run_without_privacy_has_no_text() -> None:
    assert privacy_text({"method": "pipar", "privacy": None}, config_from({})) is None
    assert privacy_text({}, None) is None


def test_the_text_names_epsilon_and_what_it_does_not_cover() -> None:
    alone = privacy_text({"method": "fl", "privacy": spent((1, 2.0))}, None)
    assert alone == "epsilon 2 at delta 1e-05 for 1 update of each device, clipped to 0.5, noise 4 times that"
    split = privacy_text({"method": "pipar", "privacy": spent((2, 2.5), (3, 4.25))}, None)
    assert split is not None
    assert split.startswith("epsilon 2.5 to 4.25 at delta 1e-05 for 2-3 updates of each device")
    assert split.endswith("; does not cover activations and labels, which are sent too")


def test_the_text_names_noise_on_inputs_and_labels() -> None:
    config = config_from({"privacy": {"pixel_epsilon": 1.0, "label_epsilon": 3.0}})
    assert privacy_text({"method": "sfl"}, config, " | ") == (
        "inputs: noise of 0.254 on each normalised value (PixelDP with epsilon 1 and delta 0.05 for changes up to 0.1)"
        " | labels: randomised response with epsilon 3 where they leave a device"
    )


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"privacy": {"max_leakage": 0.5}}, "privacy.max_leakage = 0.5 needs privacy.leakage, a file"),
        ({"data": {"shape": [1, 2]}}, "data.shape = [1, 2] is not the shape"),
    ],
)
def test_an_error_about_two_keys_of_a_section_begins_with_one_of_them(tree: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_from(tree)
    assert str(raised.value).startswith(says)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"equivalence": "exact", "equivalence_reasons": []}, "exact"),
        ({"equivalence": "statistical", "equivalence_reasons": ["dropout"]}, "statistical: dropout"),
        ({"equivalence": "statistical", "equivalence_reasons": ["a b", "c"]}, "statistical: a b, c"),
        ({"equivalence": "statistical"}, "statistical"),  # of an earlier version
        ({"equivalence": "lossy"}, "statistical: lossy encoding"),
        ({}, None),  # of a run without a result yet
    ],
)
def test_the_equivalence_is_named_with_its_reasons(result: dict[str, Any], text: str | None) -> None:
    assert equivalence_text(result) == text


def test_a_network_that_is_not_numbered_in_layers_has_no_p() -> None:
    assert plan_text(Plan(1, 1, up="planes", down="planes"), 1) == "whole network N=1 planes"
    assert plan_text(Plan(1, 12), 5) == plan_text(Plan(1, 12), None) == "P=1 N=12"


def test_only_a_method_that_cuts_networks_says_that_it_cuts_none() -> None:
    said = "the whole network on the device: federated learning"
    assert whole_network_text("pipar", [Plan(5, 1), Plan(5, 2)], 5) == said
    assert whole_network_text("pipar", [Plan(5, 1), Plan(4, 2)], 5) == ""
    assert whole_network_text("fl", [Plan(5, 1)], 5) == ""
    assert whole_network_text("pipar", [Plan(5, 1)], None) == ""


def test_only_numbers_of_statistical_runs_have_a_mark() -> None:
    assert statistical_mark({"equivalence": "statistical", "equivalence_reasons": ["dropout"]}) == " †"
    assert statistical_mark({"equivalence": "lossy"}) == " †"  # in a result of an earlier version
    assert statistical_mark({"equivalence": "exact", "equivalence_reasons": []}) == statistical_mark({}) == ""
