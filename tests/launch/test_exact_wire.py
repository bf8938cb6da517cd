"""Every exact encoding trains the same bits, also when devices, rounds, plans or the server are disturbed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.roaming import A, B, C, Roamed, roam, same
from support.training import Case, hand_made_profile
from torch import nn

from pipar.events import Back, Dropped, Lost, Replanned, RoundRestarted
from pipar.methods import Plan
from pipar.profiling.profile import CodingTimes, Profile
from pipar.tensors.relu_outputs import rectified_cuts
from pipar.transport.channel import Channel
from pipar.wire import encodings
from pipar.wire.messages import Kind, Message

pytestmark = pytest.mark.usefixtures("one_thread", "all_is_coded")

ENCODINGS = ("raw", "auto", "sparse-planes")
SIZES = (30, 20, 12)
NOWHERE: Mapping[str, float] = {}
SHARES = {"planes": (0.9, 0.9), "sparse": (0.5, 0.5), "sparse-planes": (0.45, 0.45)}


def with_coding(model: Any, input_shape: Any, dtype: str, **overheads: float) -> Profile:
    """Return a profile in which encodings are worth their time and the cuts after a ReLU are marked."""
    plain = hand_made_profile(model, input_shape, dtype, **overheads)
    rectified = rectified_cuts(model, input_shape)
    layers = tuple(
        replace(layer, rectified=cut in rectified, shares=SHARES) for cut, layer in enumerate(plain.layers, start=1)
    )
    times = CodingTimes(encode_s=1e-4, decode_s=1e-6)
    return replace(plain, layers=layers, coding=dict.fromkeys((*SHARES, "changes"), times))


@pytest.fixture
def all_is_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let profiles have encodings to choose from, and tensors have several chunks."""
    monkeypatch.setattr("support.training.hand_made_profile", with_coding)
    monkeypatch.setattr(encodings, "_CHUNK_BYTES", 400)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[Kind, str]]:
    """Count sent messages by kind and encoding; a tensor of one chunk does not count as encoded."""
    counted: Counter[tuple[Kind, str]] = Counter()
    post = Channel.post

    def counting(self: Channel, message: Message) -> None:
        coded = message.body.chunks
        if coded is None or coded.count > 1:
            counted[message.kind, message.body.encoding] += 1
        post(self, message)

    monkeypatch.setattr(Channel, "post", counting)
    return counted


Sent = Counter[tuple[Kind, str]]


def network() -> nn.Sequential:
    """Return a network of five layers; the outputs of the second and the fourth have zeros."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first, second, last = nn.Linear(16, 40), nn.Linear(40, 24), nn.Linear(24, 10)
    return nn.Sequential(nn.Sequential(nn.Flatten(), first), nn.ReLU(), second, nn.ReLU(), last)


def run(case: Case, cuts: Mapping[str, Sequence[int]], **how: Any) -> Roamed:
    return roam(case, cuts, model=network(), **how)


def in_every_encoding(case: Case, sent: Sent, cut: Mapping[str, float] = NOWHERE, **how: Any) -> dict[str, Roamed]:
    """Return the outcome of a case with each encoding, after checking that the weights are the same bits.

    `cut` gives by device the share of the frames of an undisturbed run after which its link is lost.
    """
    found = {}
    for encoding in ENCODINGS:
        one = replace(case, encoding=encoding)
        frames = run(one, {}).carried if cut else {}
        cuts = {name: [int(share * frames[name])] for name, share in cut.items()}
        sent.clear()
        found[encoding] = run(one, cuts, **how)
        coded = {of for kind, of in sent if kind in (Kind.ACTIVATION, Kind.GRADIENT)}
        assert coded == {"raw"} if encoding == "raw" else coded & {"sparse-planes", "planes", "sparse"}, coded
        assert (sent[Kind.MODEL, "changes"] > 2) is (encoding != "raw")
    raw = found["raw"]
    for encoding, other in found.items():
        assert other.counted == raw.counted, encoding
        assert same(other.state, raw.state), encoding
    return found


def case(method: str = "pipar", split_points: tuple[int, ...] = (2, 1, 4), **others: Any) -> Case:
    pieces = (3, 2) if method == "pipar" else (1,)
    return Case(method, split_points, pieces, **{"sizes": SIZES, "epochs": 3, "dtype": "float32", **others})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pipar", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sfl", "sfl2"))])
def test_encodings_do_not_change_an_undisturbed_training(method: str, sent: Sent) -> None:
    in_every_encoding(case(method, (2,) if method == "sfl2" else (2, 1, 4)), sent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("aggregator", "given"), [("fedprox", {"proximal": 3.0}), ("fedadam", {}), ("fedavgm", {"server_momentum": 0.9})]
)
def test_encodings_do_not_change_any_aggregator(aggregator: str, given: dict[str, float], sent: Sent) -> None:
    in_every_encoding(case(aggregator=aggregator, aggregation=tuple(given.items())), sent)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", ["reset", "keep"])
def test_lost_links_do_not_change_encoded_trainings(momentum: str, sent: Sent) -> None:
    found = in_every_encoding(case(momentum=momentum), sent, {A: 0.3, B: 0.5, C: 0.8})
    assert all(len(one.of(Back)) == 3 and not one.of(Dropped) for one in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pipar", "sfl2"])
def test_a_device_that_is_lost_and_joins_again_is_sent_the_whole_model(method: str, sent: Sent) -> None:
    lost = case(method, (2,), epochs=5)
    found = in_every_encoding(lost, sent, {B: 0.3}, pause_s=0.3, resume_window=0.1)
    for one in found.values():
        assert [event.device for event in one.of(Lost)] == [B]  # type: ignore[attr-defined]
        absent = [B not in counts for counts in one.counted]
        assert any(absent)
        assert not absent[-1]


@pytest.mark.slow
@pytest.mark.parametrize("momentum", ["reset", "keep"])
def test_a_device_that_is_late_in_a_round_continues_with_the_next_model(momentum: str, sent: Sent) -> None:
    late = case(epochs=4, momentum=momentum)
    slowest_s = max(max(result.seconds for result in run(replace(late, encoding=e), {}).results) for e in ENCODINGS)
    how = {"pause_s": 1.2 * slowest_s, "round_deadline": 1.1 * slowest_s, "resume_window": 100.0}
    found = in_every_encoding(late, sent, {A: 0.35}, **how)
    for one in found.values():
        assert [event.device for event in one.of(Dropped)][:1] == [A]  # type: ignore[attr-defined]
        assert not one.of(Lost)
        assert A in one.counted[-1]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pipar", "sfl2"])
def test_encodings_do_not_change_a_restarted_round(method: str, sent: Sent) -> None:
    restarted = case(method, (2,), epochs=4)
    undisturbed = run(replace(restarted, encoding="raw"), {})
    cut = dict.fromkeys((A, B, C), 0.4)
    found = in_every_encoding(restarted, sent, cut, pause_s=0.5, resume_window=0.2, min_devices=3)
    for one in found.values():
        assert len(one.of(RoundRestarted)) >= 1
        assert same(one.state, undisturbed.state)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [pytest.param("reset", marks=pytest.mark.slow), "keep"])
def test_encodings_do_not_change_layers_that_change_sides(
    momentum: str, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipar.planner.replanner.NOTICED", -1.0)
    moving = case(split_points=(2,), epochs=6, momentum=momentum)
    plans = {
        "raw": [Plan(1, 2), Plan(4, 3), Plan(4, 2), Plan(2, 1), Plan(5, 1)],
        "auto": [
            Plan(1, 2, 0, "planes", "planes"), Plan(4, 3, 0, "sparse-planes", "planes"),
            Plan(4, 2, 0, "planes", "sparse"), Plan(2, 1, 0, "sparse", "sparse-planes"), Plan(5, 1),
        ],
    }  # fmt: skip
    states = []
    for encoding, chosen in plans.items():
        sent.clear()
        one = run(replace(moving, encoding=encoding), {A: [17]}, replan=chosen)
        assert len(one.of(Replanned)) == 5
        states.append(one.state)
        assert bool(sent[Kind.MODEL, "changes"]) is (encoding == "auto")
    assert same(*states)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pipar", "sfl2"])
def test_encodings_do_not_change_a_resumed_training(method: str, sent: Sent) -> None:
    long = case(method, (2,), epochs=4)
    whole = run(replace(long, encoding="raw"), {}, saves=True)
    for encoding in ENCODINGS:
        first = run(replace(long, encoding=encoding), {}, saves=True)
        sent.clear()
        rest = run(replace(long, encoding=encoding), {}, goes_on=(2, first.snapshots[2]))
        assert len(rest.counted) == 2
        assert same(rest.state, whole.state), encoding
        assert sent[Kind.MODEL, "safetensors"] >= 3  # no device has the model before
        assert bool(sent[Kind.MODEL, "changes"]) is (encoding != "raw")
