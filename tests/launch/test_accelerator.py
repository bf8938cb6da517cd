"""Training on an accelerator gives the weights of the CPU; on a stand-in, because there is no accelerator here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import networks, stand_in
from support.over_grpc import train_over_grpc
from support.training import Case, largest_error, make_job, train_by_script, train_workload
from torch import nn

from pipar.cli import doctor_checks
from pipar.cutting import frozen
from pipar.errors import ConfigError
from pipar.events import ignore
from pipar.job.equivalence import equivalence_reasons
from pipar.job.model_setup import deterministic, make_learner
from pipar.job.torch_devices import accelerator_memory
from pipar.launch.virtual import train_virtually
from pipar.methods import Plan
from pipar.nn import device_part, loss_sum, optimizers, parts, server_part
from pipar.nn.learner import TorchLearner
from pipar.planner import replanner
from pipar.profiling import repeated_timing
from pipar.profiling.layer_times import training_pass
from pipar.profiling.measure import measure_profile
from pipar.profiling.measurement_task import Batch, Measurement
from pipar.profiling.profile import Profile
from pipar.settings.config import device_specs
from pipar.tensors import bodies, crossing, torch_device
from pipar.tensors.bodies import weights_sha256

pytestmark = pytest.mark.slow

Outcome = tuple[str, list[float | None]]
PIPAR = Case("pipar", (1,), (3,), dtype="float32")


def outcome(case: Case, model: Callable[[], torch.nn.Module] | None = None) -> Outcome:
    """Return the hash of the trained weights, and the losses, in virtual time."""
    torch.manual_seed(0)  # of the weights of an own network
    trained = train_workload(case.workload(None if model is None else model()))
    return weights_sha256(trained.state), [epoch.train_loss for epoch in trained.epochs]


def accelerated(case: Case) -> Case:
    return replace(case, torch_device=stand_in.NAME)


def check_same(case: Case, model: Callable[[], torch.nn.Module] | None = None) -> None:
    """Check in this process that the accelerator gives what the CPU gives."""
    assert outcome(accelerated(case), model) == outcome(case, model)
    assert stand_in.broken == []


def check_all_same(cases: Sequence[Case]) -> None:
    for case in cases:
        check_same(case)


@pytest.mark.parametrize("method", ["pipar", "fl", "sl", "sfl", "sfl2"])
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_every_method_trains_the_same_weights(method: str, norm: str) -> None:
    micro_batches = (3,) if method == "pipar" else (1,)
    stand_in.in_child(check_same, Case(method, (2,), micro_batches, norm=norm, dtype="float32"))


def test_every_encoding_trains_the_same_weights() -> None:
    encodings = ("raw", "sparse", "planes", "sparse-planes", "fp16", "bf16", "int8", "topk")
    stand_in.in_child(check_all_same, [replace(PIPAR, encoding=name, epochs=1) for name in encodings])


def test_every_kind_of_noise_gives_the_same_weights() -> None:
    noise: tuple[tuple[tuple[str, float], ...], ...] = (
        (("noise_multiplier", 0.5),),
        (("pixel_epsilon", 0.5),),
        (("label_epsilon", 3.0),),
    )
    stand_in.in_child(check_all_same, [replace(PIPAR, privacy=one, norm="batch") for one in noise])


def test_proximal_terms_clipping_and_frozen_layers_give_the_same_weights() -> None:
    cases = [
        replace(PIPAR, aggregator="fedprox", aggregation=(("proximal", 0.3),)),
        replace(PIPAR, optimizer=(("clip_norm", 0.5),)),
        replace(PIPAR, freeze=("conv1.*",), dtype="float64"),
        replace(PIPAR, split_points=(2,), freeze=("conv1.*", "fc4.*")),
        replace(PIPAR, split_points=(1, 3, 5), schedule="1f1b"),
        replace(PIPAR, evaluate=0.2),
    ]
    stand_in.in_child(check_all_same, cases)


class Masked(nn.Module):
    """A network that makes masks and positions: recorded, they are made on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.stem(x.flatten(1)).view(-1, 4, 4)
        with torch.no_grad():
            positions = torch.arange(4, device=x.device).to(x.dtype) / 4
        later = torch.ones(4, 4, device=x.device).triu(1).bool()
        mixed = (rows @ rows.transpose(1, 2)).masked_fill(later, float("-inf")).softmax(-1) @ rows
        found: torch.Tensor = self.head(torch.relu(self.wide((mixed + positions).flatten(1))))
        return found


def check_network() -> None:
    check_same(replace(PIPAR, split_points=(1, 2, 3)), Masked)
    check_same(replace(PIPAR, shape=(1, 8, 8), cut_points=None), networks.Residual)
    check_same(replace(PIPAR, shape=(1, 8, 8), cut_points=None), networks.UNet)


def test_networks_of_ones_own_train_the_same_weights_also_where_several_tensors_cross() -> None:
    stand_in.in_child(check_network)


# --- optimiser state, plans that change, resuming

SCRIPT = [[Plan(2, 2), Plan(1, 3), Plan(3, 1)], [Plan(1, 4), Plan(4, 1), Plan(2, 2)]]
KEEPING = replace(PIPAR, momentum="keep", epochs=3, dtype="float64")


def replanned(case: Case) -> str:
    with patch.object(replanner, "NOTICED", -1.0):
        return weights_sha256(train_by_script(case.workload(), SCRIPT))


def check_replanned(name: str) -> None:
    case = replace(KEEPING, optimizer=(("name", name), ("learning_rate", 0.01)))
    assert replanned(accelerated(case)) == replanned(case)
    assert stand_in.broken == []


@pytest.mark.parametrize("name", ["sgd", "adam", "nadam", "adagrad"])
def test_plans_change_and_layers_move_with_the_state_of_their_optimiser(name: str) -> None:
    stand_in.in_child(check_replanned, name)


def resumed(first: Case, second: Case) -> str:
    """Return the weights of a training whose server is restarted after an epoch; parts come from its learner."""
    learner = _trained(first)
    snapshot = learner.snapshot()
    job, workload = make_job(second.workload()), second.workload()
    again: TorchLearner = make_learner(job, workload)
    with deterministic(0):
        again.restore(snapshot)
    assert again.snapshot().contiguous() == snapshot.contiguous()
    return weights_sha256(train_virtually(job, workload, lambda *_: None, ignore, again).state())


def _trained(case: Case) -> TorchLearner:
    workload = case.workload()
    return train_virtually(make_job(workload), workload, lambda *_: None, ignore)


def check_resumed() -> None:
    for case in (replace(KEEPING, epochs=1), Case("sfl2", (1,), (1,), epochs=1)):
        expected = resumed(case, case)
        assert resumed(accelerated(case), accelerated(case)) == expected
        assert resumed(accelerated(case), case) == expected
        assert resumed(case, accelerated(case)) == expected


def test_a_training_resumes_on_the_accelerator_or_on_the_cpu_whatever_it_began_on() -> None:
    stand_in.in_child(check_resumed)


# --- threads


def in_threads(case: Case) -> str:
    return weights_sha256(asyncio.run(train_over_grpc(case)).state)


THREADED = replace(PIPAR, even=True, sizes=(60, 40), batch_size=20, micro_batches=(3,), epochs=1)


def check_threads() -> None:
    expected = outcome(THREADED)[0]
    assert in_threads(accelerated(THREADED)) == expected
    assert stand_in.broken == []


def test_lanes_in_threads_with_streams_of_their_own_train_the_same_weights() -> None:
    stand_in.in_child(check_threads)


# --- bfloat16


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_autocast_trains_other_weights_that_are_not_called_exact(norm: str) -> None:
    case = replace(PIPAR, norm=norm, encoding="sparse-planes", split_points=(1, 2))
    workload = case.workload()
    server, devices = ({"autocast": "bf16"} for _ in range(2))
    config = workload.config
    workload.config = config.model_copy(
        update={
            "server": config.server.model_copy(update=server),
            "devices": tuple(one.model_copy(update=devices) for one in config.devices),
        }
    )
    trained = train_workload(workload)
    plain = train_workload(case.workload())
    assert "bfloat16" in equivalence_reasons(trained.job.equivalence_facts)
    assert "bfloat16" not in equivalence_reasons(plain.job.equivalence_facts)
    error = largest_error(trained.state, plain.state)
    assert 1e-6 < error < 0.05


# --- profiles, memory and bad input


def measured() -> tuple[Profile, Profile]:
    workload = PIPAR.workload()
    model = workload.checked_model()
    quick = Measurement(
        model=model,
        model_name="vgg5",
        form=workload.samples.form,
        training=workload.task,
        batch_size=20,
        budget_s=0.05,
    )
    with patch.object(repeated_timing, "PAUSE_S", 0.0):
        on_cpu = measure_profile(quick)
        return on_cpu, measure_profile(replace(quick, torch_device=torch_device.TorchDevice(stand_in.NAME)))


def test_a_profile_of_an_accelerator_names_it_and_has_its_own_place_in_the_cache() -> None:
    on_cpu, placed = stand_in.in_child(measured)
    assert (on_cpu.accelerator, placed.accelerator) == ("", "Stand-In 1")
    assert placed.machine == f"{on_cpu.machine}, Stand-In 1"
    assert placed.how.endswith("on standin")
    assert all(min(*layer.forward_s, *layer.backward_s) > 0 for layer in placed.layers)
    assert placed.step_s + placed.step_s_per_byte > 0
    assert [layer.saved_bytes for layer in placed.layers] == [layer.saved_bytes for layer in on_cpu.layers]
    assert Profile.from_json(placed.to_json()) == placed


def timed_passes() -> tuple[int, int]:
    """Return how often the stream was synchronised in a pass, and how many measurements a pass has."""
    workload = PIPAR.workload()
    device = torch_device.TorchDevice(stand_in.NAME)
    model = device.place(workload.checked_model())
    batch = Batch.random(4, workload.samples.form, workload.task, torch.float32).on(device)
    waits = 0
    synchronize = stand_in.Stream.synchronize

    def counted(stream: stand_in.Stream) -> None:
        nonlocal waits
        waits += 1
        synchronize(stream)

    with patch.object(stand_in.Stream, "synchronize", counted):
        training_pass(model, batch, device=device)
    return waits, 2 * len(model) + 2 + len(model) - 1


def test_each_time_of_an_accelerator_is_taken_when_its_work_is_done() -> None:
    waits, measurements = stand_in.in_child(timed_passes)
    assert waits == measurements


def shared_memory() -> list[Any]:
    case = replace(PIPAR, torch_device="auto")
    config = case.workload().config
    alone = replace(case, torch_device="cpu").workload().config
    only_server = alone.model_copy(update={"server": config.server})
    return [accelerator_memory(one, device_specs(one)) for one in (config, alone, only_server)]


def test_those_who_compute_on_one_accelerator_share_its_memory() -> None:
    half = stand_in.MEMORY_BYTES // 2
    both, alone, only_server = stand_in.in_child(shared_memory)
    assert both == (half, {f"phone-{letter}": half // 3 for letter in "abc"})
    assert alone == (None, {})
    assert only_server == (stand_in.MEMORY_BYTES, {})


def found_here() -> tuple[Any, ...]:
    found = torch_device.find_torch_device("auto", "server.torch_device")
    facts = doctor_checks.torch_facts()
    return found.name, str(found), doctor_checks.check_accelerators(facts).found


def test_auto_is_the_accelerator_of_this_machine_which_the_doctor_names() -> None:
    assert stand_in.in_child(found_here) == ("standin", *("standin (Stand-In 1, 1.1 GB)",) * 2)
    assert torch_device.find_torch_device("auto", "server.torch_device") == torch_device.CPU
    assert "none that torch finds" in doctor_checks.check_accelerators(doctor_checks.torch_facts()).found


def test_float64_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match=r"server.torch_device = 'mps' cannot compute in float64"):
        torch_device.TorchDevice("mps").check_dtype("float64", "server.torch_device")
    torch_device.TorchDevice("mps").check_dtype("float32", "server.torch_device")
    torch_device.TorchDevice("cuda").check_dtype("float64", "server.torch_device")


# --- mistakes that have to be found


def _unchanged(given: Any, _: Any) -> Any:
    return given


def _left_on_cpu(_: Any, given: Any) -> Any:
    return given


def _unsynchronised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.is_cpu else torch_device._copied(tensor)


def _reused() -> Callable[..., torch.Tensor]:
    kept: dict[Any, torch.Tensor] = {}
    staging = torch_device._staging

    def reused(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return kept.setdefault((tensor.shape, tensor.dtype), staging(tensor, device))

    return reused


def _read_at_once(self: loss_sum.LossSum, loss: torch.Tensor, samples: int) -> None:
    self._waiting.append((loss.detach(), samples))
    loss.item()


def _mistakes() -> dict[str, tuple[Case, Any]]:
    """Return how each mistake is made, and a training in which it matters."""
    raw = replace(PIPAR, encoding="raw", epochs=1)
    moving = replace(KEEPING, optimizer=(("name", "adam"), ("learning_rate", 0.01)))
    proximal = replace(raw, aggregator="fedprox", aggregation=(("proximal", 0.3),))
    return {
        "inputs stay on the CPU": (raw, patch.object(device_part, "mapped", _unchanged)),
        "targets stay on the CPU": (raw, patch.object(server_part, "mapped", _unchanged)),
        "activations stay on the CPU": (raw, patch.object(server_part.TorchServerPart, "_put", _left_on_cpu)),
        "gradients stay on the CPU": (
            raw,
            patch.object(device_part.TorchDevicePart, "decode", _decoded_on_cpu),
        ),
        "proximal weights stay on the CPU": (
            proximal,
            patch.object(torch_device.TorchDevice, "put_all", lambda _, state: dict(state)),
        ),
        "optimiser state stays on the CPU": (
            moving,
            patch.object(optimizers.PartOptimizer, "_own_copy", lambda _, name, key, one: one.clone()),  # noqa: ARG005
        ),
        "trained weights stay on the accelerator": (
            raw,
            patch.object(parts.Part, "changing_state", lambda part: frozen.changing_state(part.module)),
        ),
        "results are read before they are there": (
            replace(raw, encoding="planes"),
            _patched_both("to_host", _unsynchronised),
        ),
        "staging memory is reused too early": (raw, patch.object(torch_device, "_staging", _reused())),
        "a stage ends before its work is done": (
            THREADED,
            patch.object(torch_device.TorchDevice, "end_stage", lambda _: None),
        ),
        "gradients are freed while they are used": (THREADED, patch.object(optimizers, "wait_for", lambda _: None)),
        "each loss is read at once": (raw, patch.object(loss_sum.LossSum, "add", _read_at_once)),
    }


def _decoded_on_cpu(self: Any, message: Any, encoding: str) -> Any:
    return self._read_gradient(message, encoding, self._outputs.get(message.micro_batch))


@contextmanager
def _patched_both(name: str, to: Any) -> Iterator[None]:
    with patch.object(bodies, name, to), patch.object(crossing, name, to):
        yield


def findings(case: Case) -> list[str]:
    """Return what is wrong with a training on the accelerator; nothing if all is well."""
    expected = outcome(case)[0]
    stand_in.reads = 0
    try:
        trained = replanned(accelerated(case)) if case.momentum == "keep" else outcome(accelerated(case))[0]
        if case is THREADED:
            in_threads(accelerated(case))
    except BaseException as error:  # noqa: BLE001 - the finding
        return [f"{type(error).__name__}: {error}"]
    expected = replanned(case) if case.momentum == "keep" else expected
    wrong = [] if trained == expected else ["other weights"]
    return [*wrong, *stand_in.broken, *(["reads single values"] if stand_in.reads else [])]


def found(mistake: str) -> list[str]:
    case, making = _mistakes()[mistake]
    with making:
        return findings(case)


@pytest.mark.parametrize("mistake", list(_mistakes()))
def test_a_mistake_is_found(mistake: str) -> None:
    assert stand_in.in_child(found, mistake) != []


def nothing_found() -> list[str]:
    return [one for case, _ in _mistakes().values() for one in findings(case)]


def test_without_mistakes_nothing_is_found() -> None:
    assert stand_in.in_child(nothing_found) == []
