"""Named machines have the sizes of the network and times that follow from its counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipar.job.job import Job
from pipar.job.prepare import unplanned_timing_only_job
from pipar.methods import Plan
from pipar.profiling.machines import MACHINES, machine_profile, pass_s
from pipar.profiling.memory import training_bytes
from pipar.profiling.operation_counts import Counts, known_changes_share, known_counts
from pipar.profiling.profile import Profile, batch_sizes
from pipar.settings.config import MODELS
from pipar.settings.config_file import config_from

PI, I7 = MACHINES["raspberry-pi-3b"], MACHINES["i7-11850h"]


def counts_of(model: str = "vgg5", shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10) -> Counts:
    counts = known_counts(model, "group", shape, classes)
    assert counts is not None
    return counts


def profile_of(name: str, model: str = "vgg5", dtype: str = "float32") -> Profile:
    return machine_profile(MACHINES[name], counts_of(model), model=model, dtype=dtype, batch_size=100)


@pytest.mark.parametrize("name", MACHINES)
def test_a_named_machine_has_a_profile_of_every_layer_at_the_sizes_that_are_measured(name: str) -> None:
    profile = profile_of(name, "resnet18")
    assert profile.batch_sizes == batch_sizes(100, batch_statistics=False)
    assert (len(profile.layers), profile.whole) == (10, True)
    assert all(time_s > 0 for layer in profile.layers for time_s in layer.forward_s + layer.backward_s)
    assert all(layer.saved_bytes > 0 and layer.working_bytes > 0 for layer in profile.layers)
    assert profile.machine == MACHINES[name].title
    assert "Scaled, not measured" in profile.how


def test_a_named_machine_has_the_times_and_shares_of_encodings_of_a_known_network() -> None:
    profile, quick = profile_of(PI.name, "resnet18"), profile_of(I7.name, "resnet18")
    assert [layer.rectified for layer in profile.layers] == [True] * 8 + [False] * 2
    for layer in profile.layers[:8]:
        up, down = layer.shares["sparse-planes"]
        assert 0.2 < down < layer.shares["planes"][1] < 1
        assert 0.2 < up < layer.shares["planes"][0] < 1
    assert "sparse" not in profile.layers[8].shares
    assert profile.layers[9].shares == {}
    for name in ("sparse", "planes", "sparse-planes", "fp16", "bf16", "int8", "topk"):
        assert profile.coding[name].encode_s_per_byte > quick.coding[name].encode_s_per_byte > 0
        assert profile.coding[name].decode_s > quick.coding[name].decode_s > 0


def test_a_named_machine_draws_noise_by_value_and_as_much_slower_as_it_copies() -> None:
    pi, i7 = profile_of(PI.name), profile_of(I7.name)
    slower = I7.copy_bytes_per_s / PI.copy_bytes_per_s
    assert pi.noise_s_per_byte == pytest.approx(slower * i7.noise_s_per_byte)
    assert i7.noise_s_per_byte > i7.aggregate_s_per_byte > 0
    assert profile_of(PI.name, dtype="float64").noise_s_per_byte == pytest.approx(pi.noise_s_per_byte / 2)


def test_no_cut_of_a_mobilenet_is_after_a_relu() -> None:
    assert not any(layer.rectified for layer in profile_of(PI.name, "mobilenetv3_small").layers)


def test_a_time_counts_calls_and_weights_once_and_the_rest_per_sample() -> None:
    count = counts_of()[1].forward
    each = count.dense / PI.dense_macs_per_s + count.elements / PI.elements_per_s
    once = count.calls * PI.call_s + count.fixed_elements / PI.elements_per_s
    assert pass_s(PI, count, 7) == pytest.approx(once + 7 * each)
    assert profile_of(PI.name).layers[1].forward_s[-1] == pytest.approx(once + 100 * each)


def test_the_first_layer_has_no_gradient_of_its_input() -> None:
    first, second = counts_of()[:2]
    assert first.backward.dense == first.forward.dense
    assert second.backward.dense == 2 * second.forward.dense


def test_float64_takes_twice_the_time_except_for_calls_and_twice_the_bytes() -> None:
    single, double = profile_of(PI.name), profile_of(PI.name, dtype="float64")
    calls = counts_of()[2].forward.calls * PI.call_s
    for a, b in zip(single.layers[2].forward_s, double.layers[2].forward_s, strict=True):
        assert b - calls == pytest.approx(2 * (a - calls))
    assert [layer.output_bytes for layer in double.layers] == [2 * layer.output_bytes for layer in single.layers]


def test_a_core_of_the_server_is_faster_than_an_old_board_and_a_newer_board_is_faster_still() -> None:
    def whole_s(name: str) -> float:
        return sum(layer.forward_s[-1] + layer.backward_s[-1] for layer in profile_of(name).layers)

    assert whole_s("i7-11850h") < whole_s("raspberry-pi-3b") / 2
    assert whole_s("jetson-orin-nano") < whole_s("raspberry-pi-3b") / 2
    assert whole_s("raspberry-pi-5") < whole_s("raspberry-pi-3b") / 2


def test_only_the_last_layer_depends_on_the_classes() -> None:
    ten, many = counts_of(classes=10), counts_of(classes=200)
    assert ten[:-1] == many[:-1]
    assert (ten[-1].outputs, many[-1].outputs) == (10, 200)
    assert many[-1].parameters == 200 * (128 + 1)


def test_a_shape_that_was_not_counted_is_not_known() -> None:
    assert known_counts("vgg5", "group", (3, 48, 48), 10) is None
    assert known_counts("vgg16", "group", (1, 28, 28), 10) is None


def test_a_pi_holds_vgg5_but_not_a_batch_of_resnet101_on_tiny_imagenet() -> None:
    assert training_bytes(profile_of(PI.name), Plan(5, 1), 100) < PI.memory_bytes
    counts = counts_of("resnet101", (3, 64, 64), 100)
    deep = machine_profile(PI, counts, model="resnet101", dtype="float32", batch_size=100)
    assert training_bytes(deep, Plan(35, 1), 100) > PI.memory_bytes
    assert training_bytes(deep, Plan(3, 10, 1), 100) < PI.memory_bytes


def test_machines_have_the_names_that_they_are_found_by() -> None:
    assert list(MACHINES) == ["raspberry-pi-3b", "raspberry-pi-5", "jetson-orin-nano", "i7-11850h"]
    assert all(machine.name == name for name, machine in MACHINES.items())
    assert I7.cores == 8
    assert replace(PI, cores=2) != PI


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("model", MODELS)
def test_every_network_has_its_share_of_changes_in_a_round(model: str, norm: str, dtype: str) -> None:
    assert 0.05 < known_changes_share(model, norm, dtype) < 0.95
    assert known_changes_share("my own", norm, dtype) == 1.0


def test_a_named_server_sends_changes_to_named_boards_on_slow_links() -> None:
    board = {"count": 2, "profile": "raspberry-pi-5", "link": "4g"}
    tree = {
        "data": {"name": "cifar10", "samples_per_device": 100},
        "server": {"profile": "i7-11850h"},
        "devices": [board],
    }
    job = unplanned_timing_only_job(config_from(tree))
    assert isinstance(job, Job)
    fleet = job.fleet()
    assert fleet.sends_changes(fleet.members[0], fleet.members[0].link.up_bps)
