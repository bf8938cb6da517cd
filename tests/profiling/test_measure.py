"""Measuring does not change the model, and its profile has every layer and the work around them."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch
from support.waiting import PATIENCE_S
from torch import nn
from torch.nn import functional

from pipar.errors import ConfigError
from pipar.methods import Plan
from pipar.nn.device_part import TorchDevicePart
from pipar.nn.learner import TorchLearner
from pipar.nn.runtime import one_thread
from pipar.privacy.mechanisms import clip_and_noise
from pipar.profiling.cache import machine_fingerprint
from pipar.profiling.layer_times import training_pass
from pipar.profiling.measure import measure_profile
from pipar.profiling.measurement_task import Batch, Measurement
from pipar.profiling.memory import training_bytes
from pipar.profiling.profile import Profile, batch_sizes
from pipar.tasks.task import classification
from pipar.tensors.inputs import InputForm
from pipar.wire.encodings import ALL

SHAPE = (3, 8, 8)
FORM = InputForm.given(SHAPE)

pytestmark = pytest.mark.usefixtures("measured_at_once")


def small_network(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    first = [nn.Conv2d(3, 4, 3, padding=1), *([nn.BatchNorm2d(4)] if norm else []), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        nn.Sequential(*first), nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(inplace=True)), nn.Linear(16, 5)
    )


def measure(model: nn.Sequential, batch_size: int = 8, **more: object) -> Profile:
    task = classification(5)
    wanted = Measurement(
        model=model, model_name="small", form=FORM, training=task, batch_size=batch_size, budget_s=0.02
    )
    return measure_profile(replace(wanted, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "statistics", "sizes"),
    [
        (100, False, (3, 6, 25, 50, 100)),
        (32, False, (1, 2, 8, 16, 32)),
        (4, False, (1, 2, 4)),
        (1, False, (1,)),
        (32, True, (2, 8, 16, 32)),
        (2, True, (2,)),
    ],
)
def test_these_batch_sizes_are_measured(batch: int, statistics: bool, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(batch, batch_statistics=statistics) == sizes


@pytest.mark.slow
def test_a_profile_has_the_sizes_of_every_layer() -> None:
    profile = measure(small_network())
    assert profile.batch_sizes == (1, 2, 4, 8)
    assert [layer.name for layer in profile.layers] == ["0", "1", "2"]
    assert [layer.output_bytes for layer in profile.layers] == [4 * 4 * 4 * 4, 16 * 4, 5 * 4]
    assert [layer.parameter_bytes for layer in profile.layers] == [(108 + 4) * 4, (1024 + 16) * 4, (80 + 5) * 4]
    assert (profile.model, profile.dtype, profile.machine) == ("small", "float32", machine_fingerprint())


@pytest.mark.slow
def test_every_layer_takes_time_forward_and_backward() -> None:
    profile = measure(small_network())
    assert all(time_s > 0 for layer in profile.layers for time_s in layer.forward_s + layer.backward_s)


@pytest.mark.slow
def test_every_overhead_is_measured_and_loading_only_if_there_is_a_loader() -> None:
    profile = measure(small_network())
    assert profile.load_s == 0.0
    kinds = ("encode", "decode", "step", "pack", "install", "aggregate")
    costs = {kind: (getattr(profile, f"{kind}_s"), getattr(profile, f"{kind}_s_per_byte")) for kind in kinds}
    assert 1e-10 < profile.noise_s_per_byte < 1e-6
    assert all(fixed >= 0 and each >= 0 and fixed + each > 0 for fixed, each in costs.values())
    loaded: list[int] = []

    def load(samples: int) -> None:
        loaded.append(samples)
        sum(range(1000))

    assert measure(small_network(), load=load).load_s > 0
    assert set(loaded) == {8}


_SLOWED_S = 0.005


def _slowed(function: Callable[..., object]) -> Callable[..., object]:
    """Return a slower function: slower for each model, if it gets several."""

    def slowed(owner: object, *given: object, **named: object) -> object:
        end = time.thread_time() + _SLOWED_S * (len(given[0]) if given and isinstance(given[0], list) else 1)
        while time.thread_time() < end:
            pass
        return function(owner, *given, **named)

    return slowed


@pytest.mark.slow
def test_timed_overheads_are_the_functions_that_training_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"step": "step", "pack": "pack", "install": "unpack_and_install"}
    for name in calls.values():
        monkeypatch.setattr(TorchDevicePart, name, _slowed(getattr(TorchDevicePart, name)))
    monkeypatch.setattr(TorchLearner, "aggregate", _slowed(TorchLearner.aggregate))
    monkeypatch.setattr("pipar.profiling.overheads.clip_and_noise", _slowed(clip_and_noise))
    model = small_network()
    profile = measure(model)
    assert all(getattr(profile, f"{kind}_s") > _SLOWED_S / 2 for kind in calls)
    # As the server counts it: by the bytes of all complete models.
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert profile.aggregate_s_per_byte * size > _SLOWED_S / 2
    assert profile.noise_s_per_byte * 2**20 > _SLOWED_S / 2  # a part with less is measured with more


@pytest.mark.slow
def test_the_cuts_after_a_relu_are_found_with_the_shares_that_encodings_leave() -> None:
    profile = measure(small_network())
    assert [layer.rectified for layer in profile.layers] == [True, True, False]
    first, second, last = (layer.shares for layer in profile.layers)
    assert set(first) == set(second) == set(profile.coding) - {"changes"} == set(ALL) - {"raw"}
    assert 0.1 < profile.changes_share < 0.9  # five steps change the lower half of a weight's bits
    assert last == {}
    assert all(0 < share <= 1 for shares in (first, second) for both in shares.values() for share in both)
    times = [asdict(one) for one in profile.coding.values()]
    assert all(one["encode_s"] + one["encode_s_per_byte"] > 0 for one in times)
    assert all(one["decode_s"] + one["decode_s_per_byte"] > 0 for one in times)
    smooth = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.Hardswish()), nn.Linear(64, 5))
    assert set(measure(smooth).layers[0].shares) == set(ALL) - {"raw", "sparse", "sparse-planes"}


@pytest.mark.slow
def test_shares_are_those_of_the_loaded_samples() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(192, 512, bias=False), nn.ReLU()), nn.Linear(512, 5)
    )

    def dark(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return -torch.ones(samples, *SHAPE), torch.zeros(samples, dtype=torch.int64)

    (up, down) = measure(model, 32, load=dark).layers[0].shares["sparse"]
    assert max(up, down) < 0.05  # all zeros, which are not sent
    assert measure(model, 32).layers[0].shares["sparse"][0] > 0.3


@pytest.mark.slow
def test_float64_outputs_are_twice_as_large() -> None:
    single, double = measure(small_network()), measure(small_network().double(), dtype=torch.float64)
    assert double.dtype == "float64"
    assert [layer.output_bytes for layer in double.layers] == [2 * layer.output_bytes for layer in single.layers]


@pytest.mark.slow
@pytest.mark.parametrize("norm", [False, True])
def test_the_model_keeps_its_weights_gradients_statistics_and_mode(norm: bool) -> None:
    model = small_network(norm).eval()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    before = copy.deepcopy(model)
    measure(model)
    assert not model.training
    for (name, tensor), (_, kept) in zip(before.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(tensor, kept), name
    gradients = [parameter.grad for parameter in model.parameters()]
    assert gradients[0] is not None
    assert torch.equal(gradients[0], torch.ones_like(gradients[0]))
    assert gradients[1:] == [None] * (len(gradients) - 1)


@pytest.mark.slow
def test_threads_and_random_numbers_are_restored() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    seen: list[int] = []
    measure(nn.Sequential(small_network(), nn.Dropout(0.5)), load=lambda _: seen.append(torch.get_num_threads()))
    assert set(seen) == {1}
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_threads_are_restored_even_if_the_network_fails() -> None:
    threads = torch.get_num_threads()
    with pytest.raises(RuntimeError):
        measure(nn.Sequential(nn.Linear(7, 5)))
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_layers_before_the_first_parameters_have_no_backward() -> None:
    profile = measure(nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(192, 8), nn.Identity(), nn.Linear(8, 5)))
    assert [layer.backward_s for layer in profile.layers[:2]] == [(0.0,) * 4] * 2
    assert min(profile.layers[2].backward_s) > 0
    assert [layer.parameter_bytes for layer in profile.layers[:2]] == [0, 0]


@pytest.mark.slow
def test_a_network_of_one_layer_is_measured_with_its_loss() -> None:
    profile = measure(nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(192, 5))))
    assert min(profile.layers[0].forward_s + profile.layers[0].backward_s) > 0


@pytest.mark.slow
def test_frozen_layers_have_no_backward_and_exchange_only_buffers() -> None:
    model = small_network(norm=True)
    first = next(iter(model))
    first.requires_grad_(False)
    profile = measure(model)
    buffers = sum(buffer.nbytes for buffer in first.buffers())
    assert profile.changing_bytes(1, 1) == buffers
    assert (
        profile.changing_bytes(1, len(model))
        == profile.parameter_bytes(1, len(model)) - profile.parameter_bytes(1, 1) + buffers
    )
    assert not any(profile.layers[0].backward_s)
    assert all(profile.layers[0].shares.values())


@pytest.mark.slow
def test_batch_normalisation_is_never_measured_on_a_single_sample() -> None:
    assert measure(small_network(norm=True)).batch_sizes == (2, 4, 8)


@pytest.mark.slow
def test_a_tiny_budget_still_gives_one_pass_of_everything() -> None:
    profile = measure(small_network(), budget_s=0.0)
    assert profile.how == "median CPU time of 1 training pass on one thread"
    assert all(time_s > 0 for layer in profile.layers for time_s in layer.forward_s + layer.backward_s)


@pytest.mark.slow
def test_progress_grows_and_ends_at_one_in_the_callers_thread() -> None:
    shares: list[float] = []
    threads: set[int] = set()

    def note(share: float) -> None:
        shares.append(share)
        threads.add(threading.get_ident())

    measure(small_network(), progress=note)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert threads == {threading.get_ident()}


def _plain_pass_s(model: nn.Sequential, batch: Batch) -> float:
    start = time.thread_time()
    loss = functional.cross_entropy(model(batch.inputs), batch.targets, reduction="sum") / len(batch.targets)
    torch.autograd.backward(loss)
    return time.thread_time() - start


def _layers_s(model: nn.Sequential, batch: Batch) -> float:
    measured = training_pass(model, batch)
    return sum(measured.forward_s + measured.backward_s)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [12, 100])
def test_the_layers_together_take_as_long_as_the_unsplit_network(samples: int) -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        nn.Sequential(nn.Linear(1024, 128), nn.ReLU()),
        nn.Linear(128, 5),
    )
    batch = Batch.random(samples, (3, 16, 16), classification(5), torch.float32)
    with one_thread():
        pairs = [(_layers_s(model, batch), _plain_pass_s(model, batch)) for _ in range(41)]
    # In turns, because a busy machine changes its speed by a third within seconds; of each the fastest, because other
    # work on the machine only ever makes a pass slower: 2 % apart when measured.
    layers_s, plain_s = map(min, zip(*pairs, strict=True))
    assert layers_s / plain_s == pytest.approx(1.0, abs=0.15)


# --- less memory than the network needs


def wide_network() -> nn.Sequential:
    layers = [nn.Sequential(nn.Conv2d(wide, 8, 3, padding=1), nn.ReLU()) for wide in (3, 8, 8)]
    return nn.Sequential(*layers, nn.Sequential(nn.Flatten(), nn.Linear(512, 5)))


@pytest.mark.slow
def test_saved_and_working_bytes_are_measured_and_predict_what_a_plan_needs() -> None:
    profile = measure(wide_network())
    assert [layer.saved_bytes for layer in profile.layers[:3]] == [(192 + 512) * 4, 512 * 4, 512 * 4]
    assert all(layer.working_bytes > 0 for layer in profile.layers)
    assert training_bytes(profile, Plan(4, 1), 8) > training_bytes(profile, Plan(2, 4, 1), 8)


@pytest.mark.slow
def test_a_network_that_does_not_fit_is_measured_up_to_the_layer_that_does() -> None:
    whole = measure(wide_network(), batch_size=64)
    enough = training_bytes(whole, Plan(4, 1), 64)
    assert measure(wide_network(), batch_size=64, memory_bytes=enough).whole
    first = measure(wide_network(), batch_size=64, memory_bytes=enough - 1)
    assert (len(first.layers), first.total_layers, first.whole) == (3, 4, False)
    for layer, same in zip(first.layers, whole.layers, strict=False):
        assert (layer.name, layer.output_bytes, layer.parameter_bytes) == (
            same.name,
            same.output_bytes,
            same.parameter_bytes,
        )


@pytest.mark.slow
def test_batches_that_do_not_fit_have_times_in_proportion_to_the_largest_that_does() -> None:
    whole = measure(wide_network(), batch_size=64)
    memory_bytes = training_bytes(whole, Plan(3, 1), 32)
    first = measure(wide_network(), batch_size=64, memory_bytes=memory_bytes)
    assert first.batch_sizes == (2, 4, 16, 32, 64)
    assert "above a batch of 32 in proportion" in first.how
    for layer in first.layers:
        assert layer.forward_s[-1] == 2 * layer.forward_s[-2]
        assert layer.backward_s[-1] == 2 * layer.backward_s[-2]


def test_a_machine_too_small_for_the_first_layer_gets_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"Not even the first layer of small fits into 1\.0 MB: give more memory"):
        measure(wide_network(), memory_bytes=1_000_000)


UNDER_A_LIMIT = """
import resource, torch
from torch import nn
from pipar.tasks.task import classification
from pipar.profiling.measure import measure_profile
from pipar.profiling.measurement_task import Measurement
from pipar.tensors.inputs import InputForm

layers = [nn.Sequential(nn.Conv2d(wide, 64, 3, padding=1), nn.ReLU()) for wide in (3, 64, 64, 64)]
model = nn.Sequential(*layers, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5)))
with open("/proc/self/status") as status:
    (used,) = (int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + 130 * 2**20,) * 2)
form = InputForm.given((3, 32, 32))
profile = measure_profile(Measurement(
    model=model, model_name="wide", form=form, training=classification(5), batch_size=128, budget_s=0.1
))
print(len(profile.layers), profile.total_layers, profile.batch_sizes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is one of Linux")
def test_a_limit_of_the_system_gives_the_first_layers_and_no_crash() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    layers, total, sizes = done.stdout.split(maxsplit=2)
    assert 1 <= int(layers) < int(total) == 5
    assert sizes.strip() == "(4, 8, 32, 64, 128)"
