"""Which of the returned models are too far from the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipar.aggregation.update_check import UpdateCheck
from pipar.errors import UnusableModelError

PARAMETERS = {"weight"}


def state(weight: float = 1.0, mean: float = 0.0, variance: float = 1.0, batches: int = 5, order: int = 0) -> Any:
    return {
        "weight": torch.full((4,), weight),
        "running_mean": torch.full((4,), mean),
        "running_var": torch.full((4,), variance),
        "num_batches_tracked": torch.tensor(batches),
        "order": torch.tensor([order, 1]),
    }


def compared(*models: Any, check: UpdateCheck | None = None) -> UpdateCheck:
    """Return the check after a round of devices a, b, ... with these models."""
    check = check or UpdateCheck()
    check.begin()
    for device, model in zip("abcd", models, strict=False):
        if model is not None:
            check.add(device, model, state(), PARAMETERS, 10)
    check.check()
    check.end()
    return check


def test_models_of_a_training_that_learns_pass() -> None:
    check = compared(state(1.3, 40.0, 300.0, 9), state(0.2, -3.0, 2.0, 6), state(-4.0, 0.1, 1.0, 2000))
    compared(state(2.0, 1.0), check=check)


def test_devices_that_diverge_together_pass() -> None:
    compared(state(1e9), state(-3e8), state(9e9))
    compared(state(1.0, 1e9, 1e18), state(1.0, 1e8, 1e16))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (state(1e3), "differs by"),
        (state(-1e17), "differs by"),
        (state(mean=1e5), "running_mean"),
        (state(variance=1e9), "running_var"),
        (state(order=7), "another order"),
        (state(batches=4), "num_batches_tracked"),
        (state(batches=2**62), "num_batches_tracked"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_model_far_from_the_others_is_refused_and_its_device_named(model: Any, said: str, place: int) -> None:
    models = [state(1.1), state(1.1)]
    models.insert(place, model)
    with pytest.raises(UnusableModelError, match=said) as raised:
        compared(*models)
    assert raised.value.device == "abc"[place]


def test_the_only_device_of_a_round_is_compared_with_those_before_it() -> None:
    compared(state(1e4))  # there was none
    check = compared(state(1.1))
    with pytest.raises(UnusableModelError):
        compared(None, state(1e4), check=check)


@pytest.mark.parametrize("momentum", [0.1, None], ids=["running average", "cumulative average"])
@pytest.mark.parametrize("claimed", [0, 1, 3, 10**8])
def test_batch_statistics_cannot_be_raised_slowly_by_one_device(momentum: float | None, claimed: int) -> None:
    """Honest devices start each round from an average that the hostile one has raised."""
    check, mean, batches, refused = UpdateCheck(), 1.0, 100, "nobody"
    for _ in range(30):
        kept = 0.9**3 if momentum else batches / (batches + 3)
        honest = state(mean=kept * mean + (1 - kept) * 1.0, batches=batches + 3)
        hostile = state(mean=900 * max(1.0, float(honest["running_mean"][0])), batches=batches + claimed)
        models = {"a": honest, "b": honest, "c": hostile}
        check.begin()
        for device, model in models.items():
            check.add(
                device, model, state(mean=mean, batches=batches), PARAMETERS, 20, {"num_batches_tracked": momentum}
            )
        try:
            check.check()
        except UnusableModelError as error:
            refused = error.device
            del models[refused]
        check.end()
        mean = sum(float(model["running_mean"][0]) for model in models.values()) / len(models)
        batches += 3
    assert mean < 1000
    assert refused == "c"


def test_integers_that_all_devices_change_pass() -> None:
    compared(state(order=7), state(order=8))


def test_a_round_that_did_not_end_is_forgotten() -> None:
    check = UpdateCheck()
    check.begin()
    check.add("a", state(1e6), state(), PARAMETERS, 10)
    check = compared(None, state(1.1), check=check)
    with pytest.raises(UnusableModelError):
        compared(state(1e4), check=check)


def test_few_devices_are_remembered() -> None:
    check = UpdateCheck()
    for number in range(100):
        check.begin()
        check.add(str(number), state(), state(), PARAMETERS, 10)
        check.check()
        check.end()
    assert len(check._counted) == 16


def test_parts_without_trained_weights_are_compared_by_their_buffers() -> None:
    check = UpdateCheck()
    for device, mean in (("a", 0.5), ("b", 0.1), ("c", 1e5)):
        check.add(device, state(mean=mean), state(), frozenset(), 10)
    with pytest.raises(UnusableModelError, match="running_mean") as raised:
        check.check()
    assert raised.value.device == "c"
