"""Activations of frozen layers are computed and sent once, and the weights are the same bits as without that."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from support.networks import Residual
from support.over_grpc import train_over_grpc
from support.training import EXACT, Case, Trained, largest_error, make_job, reference_state, train_in_virtual_time
from torch import nn

from pipar.events import EpochResult, Event, NotKept, ignore
from pipar.launch.virtual import train_timing_only, train_virtually
from pipar.tensors.bodies import weights_sha256

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

FROZEN = ("conv?.*",)


def forwards(trained: Trained, epoch: int) -> int:
    return sum(span.kind == "fc" and span.epoch == epoch and not span.waiting for span in trained.spans)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "case",
    [
        Case("pipar", (2,), (3,), sizes=(101, 7)),
        Case("pipar", (1, 3), (5, 2), sizes=(23, 17, 1), schedule="1f1b"),
        Case("pipar", (2, 4), (3, 3), sizes=(23, 17), momentum="keep"),  # the second device trains a layer
        Case("sfl", (2,), sizes=(23, 17)),
        Case("sfl2", (2,), sizes=(23, 17)),
        Case("sl", (3,), sizes=(23, 17)),
        Case("pipar", (2,), (3,), sizes=(23, 17), aggregator="fedavgm"),
    ],
    ids=str,
)
def test_weights_are_the_same_bits_as_without_the_cache(case: Case, dtype: str) -> None:
    case = replace(case, dtype=dtype, freeze=FROZEN, epochs=3)
    cached, plain = (train_in_virtual_time(replace(case, cache=cache)) for cache in ("1GiB", "off"))
    assert weights_sha256(cached.state) == weights_sha256(plain.state)
    if dtype == "float64" and case.aggregator == "fedavg":
        assert largest_error(cached.state, reference_state(case)) < EXACT
    assert [epoch.val_loss for epoch in cached.epochs] == [epoch.val_loss for epoch in plain.epochs]
    for epoch in (2, 3):
        assert cached.epochs[epoch - 1].bytes_up < plain.epochs[epoch - 1].bytes_up
        assert forwards(cached, epoch) < forwards(plain, epoch)


def test_later_epochs_send_less_than_a_hundredth_and_compute_nothing_on_devices() -> None:
    case = Case("pipar", (1,), (2,), sizes=(101, 57), shape=(1, 16, 16), freeze=FROZEN, epochs=3)
    trained = train_in_virtual_time(case)
    first, *later = trained.epochs
    for result in later:
        assert result.bytes_up < 0.01 * first.bytes_up
        assert result.bytes_down < 0.01 * first.bytes_up
        assert result.seconds < 0.5 * first.seconds
        assert result.bound_s <= result.seconds
        assert result.predicted_s == pytest.approx(result.seconds, rel=0.1)
        assert forwards(trained, result.epoch) == 0
    assert trained.epochs[0].predicted_s == pytest.approx(first.seconds, rel=0.1)


@pytest.mark.parametrize(
    "case",
    [
        Case("pipar", (2,), (3,), augment=True),
        Case("pipar", (2,), (3,), privacy=(("pixel_epsilon", 0.5),)),
        Case("pipar", (2,), (3,), encoding="int8"),
        Case("pipar", (2,), (1,), norm="batch"),
        Case("pipar", (2,), (3,), cache="1kB"),
        Case("pipar", (2,), (3,), cache="off"),
    ],
    ids=["augmentation", "noise", "lossy", "batch statistics", "too small", "off"],
)
def test_what_differs_between_epochs_or_does_not_fit_is_sent_in_every_epoch(case: Case) -> None:
    trained = train_in_virtual_time(replace(case, sizes=(23, 17), freeze=FROZEN, epochs=2))
    assert forwards(trained, 2) == forwards(trained, 1) > 0


def test_it_is_said_once_that_there_is_no_room() -> None:
    workload = Case("pipar", (2,), (3,), sizes=(23, 17), freeze=FROZEN, epochs=3, cache="1kB").workload()
    seen: list[Event] = []
    train_virtually(make_job(workload), workload, lambda *_: None, seen.append)
    told = [event for event in seen if isinstance(event, NotKept)]
    assert sorted(event.device for event in told) == ["phone-a", "phone-b"]
    assert "are allowed" in told[0].reason


def test_randomised_labels_are_kept_with_their_activations() -> None:
    case = Case("pipar", (2,), (3,), sizes=(23, 17), freeze=FROZEN, epochs=3, privacy=(("label_epsilon", 1.0),))
    cached, plain = (train_in_virtual_time(replace(case, cache=cache)) for cache in ("1GiB", "off"))
    assert weights_sha256(cached.state) == weights_sha256(plain.state)
    assert forwards(cached, 2) == 0


def test_a_recorded_network_with_batch_normalisation_in_eval_mode_is_cached() -> None:
    class Fixed(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> Fixed:  # noqa: ARG002
            super().train(False)
            return self

    def made() -> nn.Module:
        torch.manual_seed(0)
        model = Residual(norm=Fixed)
        for part in (model.stem, model.layer1):
            part.requires_grad_(False)
        return model

    case = Case("pipar", (3,), (3,), sizes=(23, 17), epochs=3, dtype="float32")
    cached, plain = (train_in_virtual_time(replace(case, cache=cache), made()) for cache in ("1GiB", "off"))
    assert weights_sha256(cached.state) == weights_sha256(plain.state)
    assert forwards(cached, 2) == 0


def test_weights_over_grpc_are_the_same_bits() -> None:
    case = Case("pipar", (2,), (3,), sizes=(23, 17), freeze=FROZEN, epochs=3, dtype="float32", even=True)
    real = asyncio.run(train_over_grpc(case))
    assert weights_sha256(real.state) == weights_sha256(train_in_virtual_time(replace(case, cache="off")).state)
    assert real.epochs[1].bytes_up < 0.5 * real.epochs[0].bytes_up


def test_a_timing_only_run_sends_references_too() -> None:
    case = Case("pipar", (1,), (2,), sizes=(101, 57), shape=(1, 16, 16), freeze=FROZEN, epochs=3)
    results: list[EpochResult] = []
    train_timing_only(make_job(case.workload()), lambda result, _: results.append(result), ignore)
    trained = train_in_virtual_time(replace(case, encoding="raw")).epochs
    assert [result.seconds for result in results] == pytest.approx([result.seconds for result in trained], rel=0.02)
    assert results[1].bytes_up < 0.01 * results[0].bytes_up
