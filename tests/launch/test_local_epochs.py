"""run.local_epochs: a round is several passes over each device's data, equal to the method's definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.training import EXACT, SIZES, Case, largest_error, make_job, reference_state, train_in_virtual_time

from pipar.errors import ConfigError
from pipar.events import EpochResult, ignore
from pipar.execution.spans import Span
from pipar.job.job import Job
from pipar.launch.virtual import train_timing_only
from pipar.planner.simulator import simulate
from pipar.settings.config_file import config_from

CASES = [
    Case("fl", (5,)),
    Case("sfl", (2,), (1,)),
    Case("sl", (2,), (1,)),
    Case("sfl2", (2,), (1,)),
    Case("pipar", (1,), (1,)),
    Case("pipar", (3,), (3,), schedule="1f1b"),
    Case("pipar", (5,), (7,)),
    Case("pipar", (1, 3, 5), (7, 3, 1), momentum="keep"),
    Case("pipar", (2,), (3,), sizes=(130,), augment=True, shape=(3, 4, 4)),
    Case("pipar", (2,), (3,), encoding="raw", freeze=("conv1.*", "conv2.*")),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("local_epochs", [2, 3])
def test_several_passes_a_round_train_the_weights_of_the_definition(case: Case, local_epochs: int) -> None:
    case = replace(case, local_epochs=local_epochs)
    trained = train_in_virtual_time(case)
    assert largest_error(trained.state, reference_state(case)) < EXACT
    assert trained.samples == [local_epochs * sum(case.sizes)] * case.epochs


def test_each_pass_has_its_own_order() -> None:
    case = Case("pipar", (1,), (2,), sizes=(20,), batch_size=7)
    several = largest_error(
        train_in_virtual_time(replace(case, epochs=1, local_epochs=2)).state,
        train_in_virtual_time(replace(case, epochs=2, momentum="keep")).state,
    )
    assert several < EXACT  # with one device and kept momentum, two passes are two epochs


def times(case: Case) -> tuple[Job, list[EpochResult]]:
    job, epochs = make_job(case.workload()), []

    def emit(result: EpochResult, _: list[Span]) -> None:
        epochs.append(result)

    train_timing_only(job, emit, ignore)
    return job, epochs


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fl", "sfl", "pipar"])
def test_the_planners_simulation_knows_the_passes(method: str) -> None:
    case = Case(method, (5,) if method == "fl" else (2,), (3,), local_epochs=3, encoding="raw")
    job, epochs = times(case)
    simulated = simulate(job.fleet(), job.plans).epoch_s
    assert simulated == pytest.approx(epochs[0].seconds, rel=2e-4)
    assert epochs[0].predicted_s == pytest.approx(epochs[0].seconds, rel=2e-4)
    steady = simulate(job.fleet(), job.plans, 6).steady_epoch_s(job.fleet())
    assert steady == pytest.approx(simulated, rel=0.1)
    assert all(epoch.bound_s <= epoch.seconds for epoch in epochs)
    once = times(replace(case, local_epochs=1))[0]
    assert job.bounds().server_s == pytest.approx(3 * once.bounds().server_s)


@pytest.mark.slow
def test_activations_of_frozen_layers_are_sent_in_the_first_round_only() -> None:
    case = Case("pipar", (2,), (3,), freeze=("conv1.*", "conv2.*"), epochs=3, local_epochs=2, encoding="raw")
    trained = train_in_virtual_time(case)
    plain = train_in_virtual_time(replace(case, cache="off"))
    assert largest_error(trained.state, plain.state) == 0.0
    assert trained.epochs[0].bytes_up == plain.epochs[0].bytes_up
    assert trained.epochs[1].bytes_up < plain.epochs[1].bytes_up / 2
    _, timed = times(case)
    assert [epoch.bytes_up for epoch in timed[1:]] == pytest.approx([e.bytes_up for e in trained.epochs[1:]], rel=0.05)


@pytest.mark.parametrize("given", [0, -1, 1.5, True, 100_001])
def test_a_number_of_passes_that_makes_no_sense_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"run\.local_epochs"):
        config_from({"run": {"local_epochs": given}})


def test_samples_of_a_round_are_counted_in_each_pass() -> None:
    trained = train_in_virtual_time(Case("pipar", (1,), (2,), sizes=SIZES[:1], epochs=1, local_epochs=2))
    assert trained.samples == [2 * SIZES[0]]
