"""data.evaluate_on_devices: the global model on each device's own samples, as plain PyTorch evaluates it."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.deployments import check_weights, training
from support.networks import Residual
from support.programs import address_of, place
from support.training import EXACT, Case, Trained, make_job, train_workload
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import pipar
from pipar.data.images import Images
from pipar.errors import PiparError
from pipar.events import DevicesEvaluated, EpochResult, Event, ignore
from pipar.execution.spans import COMPUTE, EVALUATION, IO, EpochTrace, Span, with_one_evaluation
from pipar.job.workload import Workload
from pipar.launch.virtual import train_timing_only, train_virtually
from pipar.profiling.memory import BASE_BYTES
from pipar.settings.config_file import config_from

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = (23, 9, 14)
SMALL: dict[str, Any] = {"sizes": SIZES, "batch_size": 10, "evaluate": 0.3}
TASK = (("metrics", ("f1", "perplexity")),)


def plain_values(model: nn.Module, images: Images) -> dict[str, float]:
    """Return loss and accuracy of a module in eval mode on all samples at once."""
    inputs, labels = images.normalised(images.images, torch.float64), images.labels
    with torch.no_grad():
        output = model.eval()(inputs)
    accuracy = (output.argmax(1) == labels).double().mean().item()
    loss = F.cross_entropy(output, labels).item()
    return {"loss": loss, "accuracy": accuracy, "perplexity": math.exp(loss)}


def check_against_plain_pytorch(trained: Trained, workload: Workload) -> None:
    """Compare the values of every device after the last round with those of the user's own module."""
    model = workload.network()
    model.load_state_dict(trained.state)
    table = trained.epochs[-1].device_metrics["devices"]
    assert list(table) == workload.names
    for name, values in table.items():
        images = workload.samples.evaluation_images(name)
        assert images is not None
        expected = plain_values(model, images)
        assert values["samples"] == len(images)
        for key in values.keys() & expected.keys():
            assert values[key] == pytest.approx(expected[key], rel=EXACT, abs=EXACT), (name, key)


def every_case() -> Iterator[Any]:
    cases = [
        Case("fl", **SMALL),
        Case("pipar", (2,), (3,), task=TASK, **SMALL),
        Case("pipar", (1, 3, 5), (7, 3, 1), norm="batch", **SMALL),
        Case("pipar", (4,), (1,), momentum="keep", encoding="int8", **SMALL),
        Case("sl", (3,), norm="batch", **SMALL),
        Case("sfl", (1, 4, 2), **SMALL),
        Case("sfl2", (2,), **SMALL),
        Case("pipar", (2,), (2,), **{**SMALL, "sizes": (17,)}),
        Case("pipar", (2,), (3,), freeze=("conv1.*", "fc4.*"), **SMALL),
    ]
    for number, case in enumerate(cases):
        yield pytest.param(case, id=f"{number}-{case}", marks=() if number == 1 else pytest.mark.slow)


@pytest.mark.parametrize("case", list(every_case()))
def test_values_of_each_device_are_those_of_plain_pytorch_in_eval_mode(case: Case) -> None:
    workload = case.workload()
    trained = train_workload(workload)
    assert len(trained.epochs) == 2
    check_against_plain_pytorch(trained, workload)


@pytest.mark.slow
def test_a_network_that_is_no_sequence_is_evaluated_as_the_users_own_module() -> None:
    case = Case("pipar", (2, 4), (3,), shape=(1, 8, 8), **{**SMALL, "sizes": (23, 12)})
    workload = case.workload(Residual(norm=nn.BatchNorm2d, dropout=0.5).double())
    check_against_plain_pytorch(train_workload(workload), workload)


@pytest.mark.slow
def test_values_of_a_round_do_not_depend_on_the_rounds_after_it() -> None:
    case = Case("pipar", (2,), (3,), **SMALL)
    shorter, longer = (train_workload(replace(case, epochs=epochs).workload()) for epochs in (1, 2))
    assert longer.epochs[0].device_metrics["devices"] == shorter.epochs[0].device_metrics["devices"]


# --- which samples


def test_held_out_samples_are_drawn_by_the_seed_and_never_trained_on() -> None:
    workload, again, other = (Case("fl", **SMALL, seed=seed).workload() for seed in (1, 1, 2))
    everything = Case("fl", sizes=SIZES, batch_size=10, seed=1).workload()
    for name, size, kept in zip(workload.names, SIZES, (7, 3, 4), strict=True):
        images = workload.samples.evaluation_images(name)
        assert images is not None
        shard, whole = workload.samples.shard(name), everything.samples.shard(name)
        assert (len(images), len(shard)) == (kept, size - kept)
        rows = {row.numpy().tobytes() for row in images.images}
        assert rows.isdisjoint(row.numpy().tobytes() for row in shard.images.take(shard.indices).images)
        assert set(shard.indices) < set(whole.indices)
        assert np.array_equal(shard.indices, again.samples.shard(name).indices)
    assert any(set(workload.samples.shard(n).indices) != set(other.samples.shard(n).indices) for n in workload.names)


def own_data(size: int, seed: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.rand(size, 1, 4, 4, generator=drawn), torch.arange(size) % 10)


def numbers(result: EpochResult) -> dict[str, Any]:
    row = result.to_dict()
    flat = {
        f"{key}.{name}": value for key in list(row) if isinstance(row[key], dict) for name, value in row[key].items()
    }
    return {key: value for key, value in {**row, **flat}.items() if isinstance(value, int | float)}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fl", "sl", "pipar"])
def test_evaluation_changes_neither_weights_nor_the_figures_of_the_round(method: str) -> None:
    case = Case(method, (2,), (3,), sizes=SIZES, batch_size=10, norm="batch")
    data, evaluation = ([own_data(size, seed) for size in SIZES] for seed in (0, 1))
    without, with_it = (train_workload(case.workload(None, data, given)) for given in (None, evaluation))
    assert without.epochs[0].device_metrics == {}
    assert all(torch.equal(without.state[name], tensor) for name, tensor in with_it.state.items())
    first, other = without.epochs[0], with_it.epochs[0]
    assert other.device_metrics["seconds"] > 0
    # Seconds, bytes, bounds, efficiency, utilisation; HELLO is a few bytes longer, so that all times are rounded anew.
    assert numbers(replace(other, device_metrics={})) == pytest.approx(numbers(first), rel=1e-9)
    check_against_plain_pytorch(with_it, case.workload(None, data, evaluation))


def test_a_trace_has_one_span_for_all_batches_of_an_evaluation() -> None:
    spans = [Span("a", EVALUATION, "validate", 1, 0, 0, start, start + 1.0) for start in (1.0, 2.0, 4.0)]
    training = Span("a", COMPUTE, "validate", 1, 0, 0, 0.0, 5.0, waiting=True)
    (first, joined) = with_one_evaluation(EpochTrace("a", 1, {}, [training, *spans])).spans
    assert (first, joined.start, joined.end) == (training, 1.0, 5.0)


@pytest.mark.slow
def test_evaluation_has_spans_of_its_own_between_the_rounds() -> None:
    trained = train_workload(Case("pipar", (2,), (3,), **SMALL).workload())
    for epoch in (1, 2):
        spans = [span for span in trained.spans if span.epoch == epoch and not span.waiting]
        evaluated = [span for span in spans if span.lane == EVALUATION]
        assert {"model", "install", "validate", "pack"} <= {span.kind for span in evaluated}
        following = [
            s.start for s in trained.spans if s.epoch == epoch + 1 and s.lane in (COMPUTE, IO) and not s.waiting
        ]
        assert max(span.end for span in evaluated) <= min(following, default=math.inf)
        metrics = trained.epochs[epoch - 1].device_metrics
        asked = min(span.start for span in evaluated if span.kind == "pack")
        assert metrics["seconds"] >= max(span.end for span in evaluated) - asked


# --- other worlds and rounds


def observed(case: Case) -> tuple[list[EpochResult], list[Event], Workload]:
    workload, epochs, events = case.workload(), [], []
    train_virtually(make_job(workload), workload, lambda result, _: epochs.append(result), events.append)
    return epochs, events, workload


@pytest.mark.slow
def test_drawn_devices_evaluate_their_round_and_all_devices_the_final_model() -> None:
    epochs, events, workload = observed(Case("pipar", (2,), (3,), devices_per_round=2, **{**SMALL, "epochs": 3}))
    drawn = [set(epoch.device_bytes) for epoch in epochs]
    assert [set(epoch.device_metrics["devices"]) for epoch in epochs] == drawn
    (final,) = (event for event in events if isinstance(event, DevicesEvaluated))
    assert list(final.scores["devices"]) == workload.names
    last = epochs[-1].device_metrics["devices"]
    assert {name: final.scores["devices"][name] for name in last} == last


def test_a_timing_only_run_has_the_times_and_no_values() -> None:
    case = Case("pipar", (2,), (3,), **SMALL)
    workload = case.workload()
    job = make_job(workload)
    both: list[list[EpochResult]] = [[], []]
    train_virtually(job, workload, lambda result, _: both[0].append(result), ignore)
    train_timing_only(job, lambda result, _: both[1].append(result), ignore)
    trained, timed = (epochs[0].device_metrics for epochs in both)
    assert timed["devices"] == {name: {"samples": kept} for name, kept in job.evaluation_sizes.items()}
    assert (timed["mean"], timed["worst_decile"]) == ({}, {})
    assert timed["seconds"] == pytest.approx(trained["seconds"], rel=0.2)


def test_a_timing_only_run_knows_which_devices_lack_memory() -> None:
    workload = Case("pipar", (2,), (3,), **SMALL).workload()
    job = make_job(workload)
    specs = [replace(spec, memory_bytes=BASE_BYTES) for spec in job.specs]
    epochs: list[EpochResult] = []
    train_timing_only(replace(job, specs=specs), lambda result, _: epochs.append(result), ignore)
    assert set(epochs[0].device_metrics["missing"]) == set(workload.names)


@pytest.mark.slow
def test_real_processes_and_virtual_time_evaluate_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    tree = Case("pipar", (2,), (3,), even=True, **{**SMALL, "sizes": (23, 9)}).tree_with_profile(tmp_path)
    real, virtual = (pipar.run(tree, world=world, progress=False).content for world in ("real", "virtual"))
    assert real["weights_sha256"] == virtual["weights_sha256"]
    for key in ("epoch", "devices", "mean", "worst_decile", "missing"):
        assert real["device_metrics"][key] == virtual["device_metrics"][key]


@pytest.mark.slow
def test_a_deployment_evaluates_every_later_model_after_a_crash(tmp_path: Path, profiles: Path) -> None:
    tree = training(epochs=6)
    tree["data"]["evaluate_on_devices"] = 0.3
    names = ("pi-1", "pi-2", "pi-3")
    with place(tmp_path, profiles, tree) as here:
        server = here.server("--set", "server.min_devices=3")
        address = address_of(server)
        devices = [here.device(name, address) for name in names]
        server.says("round 2 saved")
        server.kill()
        server = here.server("--resume", "--set", "server.min_devices=3", listen=address)
        assert server.ends() == 0
        for device in devices:  # one that was still reconnecting when the training ended keeps trying
            if device.poll() is None:
                device.signal(signal.SIGTERM)
        assert [device.ends() for device in devices] == [0] * 3
        check_weights(here, tree)
        result = here.result()
        assert list(result["device_metrics"]["devices"]) == list(names)
        assert all(list(epoch["device_metrics"]["devices"]) == list(names) for epoch in result["epochs"][2:])
        assert all(epoch["device_metrics"].get("missing", {}) == {} for epoch in result["epochs"])


# --- the best model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loss", "accuracy"])
def test_the_best_model_can_go_by_the_mean_over_devices(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    case = Case("pipar", (1,), (3,), **{**SMALL, "epochs": 5})
    tree = case.tree_with_profile(tmp_path)
    tree["data"]["validation"] = 0
    more = [f"run.monitor=devices/{name}", "run.keep=best", "optimizer.learning_rate=0.3"]
    result = pipar.run(tree, world="virtual", settings=more, progress=False)
    means = [epoch["device_metrics"]["mean"][name] for epoch in result.epochs]
    best = (min if name == "loss" else max)(means)
    kept = result.content["kept_epoch"]
    assert kept == 1 + means.index(best)
    assert result.device_metrics == result.epochs[kept - 1]["device_metrics"]


# --- bad input


def refused(tmp_path: Path, *settings: str, **own: Any) -> str:
    tree = Case("pipar", (2,), (3,), sizes=SIZES, batch_size=10).tree_with_profile(tmp_path)
    with pytest.raises(PiparError) as caught:
        pipar.run(tree, world=own.pop("world", "virtual"), settings=settings, progress=False, **own)
    return str(caught.value)


ON = "data.evaluate_on_devices=0.2"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["data.evaluate_on_devices=1.0"], "give a share above 0 and below 1"),
        (["data.evaluate_on_devices=-0.1"], "give a share above 0 and below 1"),
        (["data.evaluate_on_devices=true"], "give a share above 0 and below 1"),
        (["data.evaluate_on_devices=0.99"], "phone-a has 23 samples"),
        ([ON, "privacy.noise_multiplier=1.0"], "privacy.noise_multiplier"),
        ([ON, "privacy.pixel_epsilon=0.5"], "privacy.pixel_epsilon"),
        ([ON, "privacy.label_epsilon=1.0"], "privacy.label_epsilon"),
        (["run.monitor=devices/loss", "run.patience=2"], "data.evaluate_on_devices"),
        ([ON, "run.monitor=devices/recall", "run.patience=2"], "devices/accuracy"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(tmp_path: Path, settings: list[str], sentence: str) -> None:
    said = refused(tmp_path, *settings)
    assert sentence in said
    assert "\n" not in said


def test_bad_evaluation_datasets_are_refused_in_one_sentence(tmp_path: Path) -> None:
    sets = [own_data(5, seed) for seed in range(3)]
    data = {"datasets": [own_data(size, 0) for size in SIZES]}
    assert "2 evaluation_datasets are given for 3 devices" in refused(tmp_path, evaluation_datasets=sets[:2], **data)
    assert "one for each device" in refused(tmp_path, evaluation_datasets=sets[0], **data)
    assert "give only one of them" in refused(tmp_path, ON, evaluation_datasets=sets, **data)
    assert "privacy.label_epsilon" in refused(tmp_path, "privacy.label_epsilon=1.0", evaluation_datasets=sets, **data)
    other = TensorDataset(torch.rand(5, 1, 6, 6), torch.zeros(5, dtype=torch.long))
    said = refused(tmp_path, evaluation_datasets=[*sets[:2], other], **data)
    assert "the evaluation data of phone-c has samples of shape 1x6x6" in said
    assert "timing-only" in refused(tmp_path, ON, "run.monitor=devices/loss", "run.patience=2", world="timing-only")


@pytest.mark.parametrize("name", ["samples", "loss", "accuracy"])
def test_a_metric_of_the_users_cannot_take_the_place_of_another_value(tmp_path: Path, name: str) -> None:
    said = refused(tmp_path, ON, metrics={name: lambda _output, _targets: 50.0})
    assert f"The metric '{name}' has the name of a value" in said


def test_the_named_accuracy_is_the_mean_over_classes_and_does_not_replace_that_of_samples(tmp_path: Path) -> None:
    assert "The metric 'accuracy' has the name of a value" in refused(tmp_path, ON, 'task.metrics=["accuracy"]')


PAIRS = """
import torch
from torch.utils.data import TensorDataset

def sets(device):
    samples = TensorDataset(torch.rand(5, 1, 4, 4), torch.arange(5) % 2)
    return samples, samples
"""


def test_a_device_alone_refuses_to_evaluate_on_samples_that_it_protects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_pairs.py").write_text(PAIRS, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    tree = {"data": {"factory": "own_pairs:sets", "classes": 2}, "privacy": {"label_epsilon": 1.0}}
    with pytest.raises(PiparError, match=r"privacy\.label_epsilon does not cover: unset one of them\."):
        Workload(config_from(tree)).evaluation_samples("device-1")
