"""Why the weights of a training are not exact: one row for each reason, and for what looks like one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.hand_made_job import CONFIG, job

from pipar.job.equivalence import REASONS, EquivalenceFacts, EquivalenceLog, equivalence_reasons
from pipar.methods import Plan
from pipar.settings.config_file import with_settings

CUT, WHOLE, CUT_IN_THREE, WHOLE_IN_THREE = Plan(2, 1), Plan(5, 1), Plan(2, 3), Plan(5, 3)
FACTS = EquivalenceFacts(5, [CUT])


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        ({"averaged": 9, "plans": [CUT_IN_THREE, WHOLE]}, []),
        ({"batch_statistics": True}, []),
        ({"batch_statistics": True, "plans": [CUT, CUT_IN_THREE]}, ["batch statistics"]),
        ({"batch_statistics": True, "plans": [WHOLE_IN_THREE]}, ["batch statistics"]),
        ({"dropout": True}, ["dropout"]),
        ({"noisy_updates": True}, ["noise on updates"]),
        ({"noisy_updates": True, "plans": [WHOLE]}, ["noise on updates"]),
        ({"noisy_inputs": True}, ["noise on inputs"]),
        ({"randomised_labels": True}, ["randomised labels"]),
        ({"randomised_labels": True, "plans": [WHOLE]}, []),  # labels stay on the device
        *(({"plans": [CUT, replace(CUT, up=name)]}, ["lossy encoding"]) for name in ("fp16", "bf16", "int8", "topk")),
        ({"plans": [replace(CUT, down="topk")]}, ["lossy encoding"]),
        ({"plans": [replace(WHOLE, up="int8")]}, []),  # no activation is sent
        *(({"plans": [replace(CUT, up=name, down=name)]}, []) for name in ("sparse", "planes", "sparse-planes")),
        ({"clips_by_side": True}, ["clipping by side"]),
        ({"clips_by_side": True, "plans": [WHOLE]}, []),  # the device has the whole gradient
        ({"device_autocast": True, "plans": [WHOLE]}, ["bfloat16"]),
        ({"server_autocast": True}, ["bfloat16"]),
        ({"server_autocast": True, "plans": [WHOLE]}, []),  # the server only averages
        ({"adapters": True, "averaged": 2}, ["LoRA averaging"]),
        ({"adapters": True, "averaged": 1}, []),
        ({"noisy_inputs": True, "dropout": True}, ["dropout", "noise on inputs"]),
    ],
)
def test_each_reason_holds_only_where_it_changes_the_weights(changes: dict[str, Any], reasons: list[str]) -> None:
    assert list(equivalence_reasons(replace(FACTS, **changes))) == reasons


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        ([], []),
        (["privacy.noise_multiplier=1.0"], ["noise on updates"]),
        (["privacy.target_epsilon=8.0"], ["noise on updates"]),
        (["privacy.pixel_epsilon=1.0"], ["noise on inputs"]),
        (["privacy.label_epsilon=1.0"], ["randomised labels"]),
        (["privacy.clip=2.0"], []),  # there is no noise, and nothing is clipped without it
    ],
)
def test_a_job_takes_its_noise_from_the_configuration(settings: list[str], reasons: list[str]) -> None:
    noisy = replace(job(), config=with_settings(CONFIG, settings))
    assert list(equivalence_reasons(noisy.equivalence_facts)) == reasons
    assert noisy.equivalence == ("statistical" if reasons else "exact")


def test_adapters_are_averaged_unless_devices_hand_weights_on() -> None:
    adapted = replace(job(), adapters=True)
    assert equivalence_reasons(adapted.equivalence_facts) == ("LoRA averaging",)
    in_turn = replace(adapted, config=with_settings(CONFIG, ["run.method=sl"]))
    assert equivalence_reasons(in_turn.equivalence_facts) == ()


BATCH_NORM = EquivalenceFacts(5, [CUT], averaged=2, batch_statistics=True)


def test_plans_count_only_in_the_rounds_that_they_trained() -> None:
    log = EquivalenceLog({"a": CUT, "b": CUT})
    log.replan(2, {"a": CUT_IN_THREE, "b": CUT})
    log.replan(4, {"a": CUT, "b": CUT_IN_THREE})
    found = []
    for epoch, devices in enumerate([{"a", "b"}, {"b"}, {"a", "b"}, {"a", "b"}], start=1):
        log.end_round(epoch, devices)
        found.append(log.reasons(BATCH_NORM))
    assert found == [(), (), ("batch statistics",), ("batch statistics",)]


def test_new_plans_are_known_before_the_round_with_the_old_ones_is_over() -> None:
    log = EquivalenceLog({"a": CUT})
    log.replan(2, {"a": CUT_IN_THREE})
    log.end_round(1, {"a"})
    assert log.reasons(BATCH_NORM) == ()


def test_before_the_first_round_the_plans_to_start_with_count() -> None:
    log = EquivalenceLog({"a": CUT_IN_THREE})
    assert log.reasons(replace(BATCH_NORM, plans=[CUT_IN_THREE])) == ("batch statistics",)
    log.replan(1, {"a": CUT})
    log.end_round(1, {"a"})
    assert log.reasons(replace(BATCH_NORM, plans=[CUT_IN_THREE])) == ()


def test_a_resumed_training_keeps_the_reasons_of_its_rounds_before() -> None:
    log = EquivalenceLog({})
    log.resume({"a": CUT}, ["lossy encoding"])
    log.end_round(7, {"a"})
    assert log.reasons(replace(BATCH_NORM, dropout=True)) == ("dropout", "lossy encoding")


def test_a_single_device_averages_nothing() -> None:
    log = EquivalenceLog({"a": CUT, "b": CUT})
    log.end_round(1, {"a"})
    adapted = EquivalenceFacts(5, [CUT], averaged=2, adapters=True)
    assert log.reasons(adapted) == ()
    log.end_round(2, {"a", "b"})
    assert log.reasons(adapted) == ("LoRA averaging",)


def test_the_documents_name_every_reason() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for page in ("reference/result.md", "explanation/exactness.md"):
        text = " ".join((docs / page).read_text("utf-8").split())
        assert [reason for reason in REASONS if reason not in text] == [], page
