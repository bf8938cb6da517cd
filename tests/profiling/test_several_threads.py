"""Several threads compute a stage where a measurement says that they are faster, and profiles say how many they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from pipar.errors import ConfigError
from pipar.job.profiles import check_threads, of_threads
from pipar.profiling import several_threads
from pipar.profiling.cache import usable_cores
from pipar.profiling.layer_times import Pass
from pipar.profiling.machines import MACHINES
from pipar.profiling.measure import measure_profile
from pipar.profiling.measurement_task import Measurement
from pipar.profiling.profile import Profile
from pipar.profiling.several_threads import numbers_to_try, on_threads, with_threads
from pipar.tasks.task import classification
from pipar.tensors.inputs import InputForm

pytestmark = pytest.mark.usefixtures("measured_at_once")


def wanted() -> Measurement:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 5))
    return Measurement(
        model=model,
        model_name="small",
        form=InputForm.given((8,)),
        training=classification(5),
        batch_size=8,
        budget_s=0.02,
    )


@pytest.fixture(scope="module")
def one() -> Profile:
    return measure_profile(wanted())


def passes_that_take(seconds: Callable[[int], float]) -> Callable[..., None]:
    """Return a round of passes whose layers take so long each way by the number of threads that torch would use."""

    def one_round(model: nn.Sequential, batches: list[object], passes: list[list[Pass]], **_: object) -> None:
        both = (seconds(torch.get_num_threads()),) * len(model)
        for done, _batch in zip(passes, batches, strict=True):
            done.append(Pass(both, both))

    return one_round


def test_numbers_of_threads_double_up_to_all_cores() -> None:
    assert [numbers_to_try(cores) for cores in (1, 2, 3, 4, 6, 8)] == [
        (), (2,), (2, 3), (2, 4), (2, 4, 6), (2, 4, 8)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        ({1: 4.0, 2: 2.5, 4: 3.0}, 2),
        ({1: 4.0, 2: 2.5, 4: 1.5}, 4),
        ({1: 4.0, 2: 3.9, 4: 8.0}, 1),  # not worth a second core
    ],
)
def test_the_fastest_number_of_threads_is_taken(
    seconds: dict[int, float], fastest: int, one: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_threads, "one_round", passes_that_take(seconds.__getitem__))
    before = torch.get_num_threads()
    found = with_threads(wanted(), one, (2, 4))
    assert found.threads == fastest
    if fastest == 1:
        assert found == one
    else:
        assert {s for layer in found.layers for s in layer.forward_s + layer.backward_s} == {seconds[fastest]}
        assert found.one_thread == pytest.approx([seconds[1] / seconds[fastest]] * len(one.batch_sizes))
        assert Profile.from_json(found.to_json()) == found
        alone = found.on_one_thread()
        assert alone.layers[0].forward_s == pytest.approx([seconds[1]] * len(one.batch_sizes))
        assert (alone.threads, alone.one_thread) == (1, ())
        assert "converted to one thread" in alone.how
    assert torch.get_num_threads() == before


def test_a_given_number_of_threads_is_measured_even_if_it_is_slower(
    one: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_threads, "one_round", passes_that_take(float))
    found = on_threads(wanted(), one, 2)
    assert (found.threads, found.one_thread) == (2, (0.5,) * len(one.batch_sizes))


def test_layers_are_really_measured_on_several_threads(one: Profile) -> None:
    found = on_threads(wanted(), one, 2)
    assert found.threads == 2
    assert all(seconds > 0 for layer in found.layers for seconds in layer.forward_s)


def test_a_file_of_one_thread_does_not_say_so(one: Profile) -> None:
    assert "thread" not in one.to_json().replace("on one thread", "")
    assert Profile.from_json(one.to_json()) == one


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("threads", 0, "threads is 0"),
        ("threads", True, "threads is True"),
        ("threads", 10**9, "threads is"),
        ("one_thread", (1.0,), "one_thread is"),
        ("one_thread", (0.0,) * 5, "one_thread is"),
    ],
)
def test_impossible_threads_of_a_profile_are_refused(field: str, value: object, said: str, one: Profile) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(one, **{field: value})  # type: ignore[arg-type]


def test_a_profile_of_another_number_of_threads_is_converted_to_one_or_refused(one: Profile) -> None:
    several = replace(one, threads=4, one_thread=(2.0,) * len(one.batch_sizes))
    assert of_threads(several, "auto", "board.json") is several
    assert of_threads(several, 4, "board.json") is several
    assert of_threads(several, 1, "board.json").threads == 1
    for profile, threads in ((several, 2), (one, 2), (replace(several, one_thread=()), 1)):
        with pytest.raises(
            ConfigError, match=r"board\.json is of .* for each stage, but .* would compute it"
        ) as raised:
            of_threads(profile, threads, "board.json")
        assert f"--threads {threads} " in str(raised.value)


def test_more_threads_than_cores_are_refused() -> None:
    check_threads("auto", "devices.threads")
    check_threads(usable_cores(), "devices.threads")
    with pytest.raises(ConfigError, match=f"give at most {usable_cores()}"):
        check_threads(usable_cores() + 1, "devices.threads")


def test_named_boards_compute_a_stage_with_all_of_their_cores() -> None:
    assert {name: machine.threads for name, machine in MACHINES.items()} == {
        "raspberry-pi-3b": 4,
        "raspberry-pi-5": 4,
        "jetson-orin-nano": 6,
        "i7-11850h": 1,
    }
