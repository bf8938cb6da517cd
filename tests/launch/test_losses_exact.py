"""Every loss trains the weights of a plain loop with torch's mean over each batch, for every P, N and K."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from support import reference
from support.training import EXACT, Case, largest_error, reference_data, train_by_script, train_workload
from torch import Tensor, nn
from torch.nn import functional as F

from pipar.job.user_objects import UserObjects
from pipar.job.workload import Workload
from pipar.methods import Plan
from pipar.planner import replanner
from pipar.settings.config_file import config_from

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = (13, 5, 4)  # batches of five: two and a tail, exactly one, and less than one
CLASSES, IGNORED, SIDE, LENGTH = 3, -100, 3, 4
WEIGHTS = (0.5, 2.0, 1.25)
Item = tuple[Any, Any]


def dense(outputs: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


def pixelwise() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, CLASSES, 1))


def tokenwise() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(CLASSES, 4), nn.Linear(4, 5), nn.Linear(5, CLASSES))


def vector(draw: torch.Generator) -> Tensor:
    return torch.randn(4, generator=draw)


def classes(*shape: int, draw: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, shape, generator=draw)


def holed(*shape: int, draw: torch.Generator) -> Tensor:
    """Return classes of which about a third do not count, and in some samples none does."""
    drawn = classes(*shape, draw=draw)
    drawn[torch.rand(shape, generator=draw) < 0.35] = IGNORED
    return drawn if torch.rand((), generator=draw) < 0.8 else torch.full(shape, IGNORED)


@dataclass(frozen=True)
class Kind:
    """A network, its samples, the configured task, and the same loss by torch alone."""

    network: Callable[[], nn.Sequential]
    item: Callable[[torch.Generator], Item]
    plain: Callable[[Tensor, Any], Tensor]
    task: dict[str, Any]


def over_tokens(loss: Callable[..., Tensor], output: Tensor, targets: Tensor) -> Tensor:
    return loss(output.flatten(0, 1), targets.flatten())


def two_heads(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """A user's loss of several targets: the mean over the samples."""
    kind = F.cross_entropy(output[:, :2], targets["kind"], reduction="none")
    return (kind + (output[:, 2] - targets["size"]).square()).mean()


def masked_mean(output: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    """A user's loss that is a mean over what a mask keeps."""
    wanted, mask = targets
    return ((output - wanted).abs() * mask).sum() / mask.sum()


def kept(targets: tuple[Tensor, Tensor]) -> Tensor:
    return targets[1].sum()


def labelled(draw: torch.Generator) -> Item:
    return vector(draw), int(classes(1, draw=draw))


def shares(draw: torch.Generator) -> Item:
    return vector(draw), torch.rand(CLASSES, generator=draw).softmax(0)


def numbered(draw: torch.Generator) -> Item:
    return vector(draw), torch.randn(CLASSES, generator=draw)


def one_number(draw: torch.Generator) -> Item:
    return vector(draw), float(torch.randn((), generator=draw))


def marked(draw: torch.Generator) -> Item:
    return vector(draw), torch.rand(CLASSES, generator=draw) < 0.5


def segmented(draw: torch.Generator) -> Item:
    return torch.randn(1, SIDE, SIDE, generator=draw), holed(SIDE, SIDE, draw=draw)


def spoken(draw: torch.Generator) -> Item:
    return classes(LENGTH, draw=draw), holed(LENGTH, draw=draw)


def unlabelled(draw: torch.Generator) -> Item:
    return classes(LENGTH, draw=draw), None


def headed(draw: torch.Generator) -> Item:
    return vector(draw), {"kind": int(classes(1, draw=draw)) % 2, "size": float(torch.rand((), generator=draw))}


def masked(draw: torch.Generator) -> Item:
    return vector(draw), (torch.randn(CLASSES, generator=draw), torch.rand(CLASSES, generator=draw) < 0.6)


def own(name: str) -> str:
    return f"{__name__}:{name}"


def weighted() -> Tensor:
    return torch.tensor(WEIGHTS, dtype=torch.float64)


def plain_weighted(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, weighted(), label_smoothing=0.1)


def plain_holed(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, weighted()) if (targets != IGNORED).any() else 0.0 * output.sum()


def plain_log(output: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(output, targets, weighted())


def plain_number(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output[:, 0], targets)


def plain_bce(output: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, targets)


def logged() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, CLASSES), nn.LogSoftmax(1))


KINDS = {
    "cross_entropy": Kind(dense, labelled, F.cross_entropy, {}),
    "class weights": Kind(dense, labelled, plain_weighted, {"class_weights": WEIGHTS, "label_smoothing": 0.1}),
    "probabilities": Kind(dense, shares, F.cross_entropy, {}),
    "pixels": Kind(pixelwise, segmented, plain_holed, {"class_weights": WEIGHTS}),
    "nll": Kind(logged, labelled, plain_log, {"loss": "nll", "class_weights": WEIGHTS}),
    "next_token": Kind(
        tokenwise, spoken, partial(over_tokens, plain_holed), {"loss": "next_token", "class_weights": WEIGHTS}
    ),
    "shifted": Kind(tokenwise, unlabelled, partial(over_tokens, F.cross_entropy), {"loss": "next_token"}),
    "mse": Kind(dense, numbered, F.mse_loss, {"loss": "mse"}),
    "one number": Kind(partial(dense, 1), one_number, plain_number, {"loss": "mse"}),
    "l1": Kind(dense, numbered, F.l1_loss, {"loss": "l1"}),
    "smooth_l1": Kind(dense, numbered, F.smooth_l1_loss, {"loss": "smooth_l1"}),
    "bce": Kind(dense, marked, plain_bce, {"loss": "bce"}),
    "own": Kind(dense, headed, two_heads, {"loss": own("two_heads")}),
    "own count": Kind(dense, masked, masked_mean, {"loss": own("masked_mean"), "count": own("kept")}),
}


def workload(kind: Kind, case: Case) -> Workload:
    draw = torch.Generator().manual_seed(1)
    datasets = [[kind.item(draw) for _ in range(size)] for size in case.sizes]
    torch.manual_seed(0)
    config = config_from({**case.tree(), "task": kind.task})
    return Workload(
        config,
        UserObjects.of(config, kind.network().double(), dict(zip(case_names(case), datasets, strict=True)), None, None),
    )


def case_names(case: Case) -> list[str]:
    return [device["name"] for device in case.tree()["devices"]]


def plain_state(kind: Kind, case: Case) -> reference.State:
    """Return the weights of plain training; the reference imports nothing but torch."""
    made = workload(kind, case)
    return reference.train("fl", made.build_model(), reference_data(made), 0, case.rules(loss=kind.plain))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_loss_trains_the_weights_of_plain_torch(name: str) -> None:
    kind, case = KINDS[name], partial(Case, "pipar", batch_size=5, epochs=1)
    for sizes in (SIZES, SIZES[:1]):
        expected = plain_state(kind, case(sizes=sizes))
        for split_point, pieces in product((1, 2, 3), (1, 3, 7)):
            trained = train_workload(workload(kind, case((split_point,), (pieces,), sizes=sizes)))
            assert largest_error(trained.state, expected) < EXACT, (split_point, pieces, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["reset", "keep"])
@pytest.mark.parametrize("name", KINDS)
def test_every_loss_trains_them_over_rounds_with_other_plans(
    name: str, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("pipar", (1, 2, 3), (7, 3, 1), sizes=SIZES, batch_size=5, epochs=3, momentum=keep)
    script = [[Plan(3, 1), Plan(1, 7), Plan(2, 3)], [Plan(2, 3), Plan(3, 1), Plan(1, 7)]]
    monkeypatch.setattr(replanner, "NOTICED", -1.0)  # every round's links count as changed
    trained = train_by_script(workload(KINDS[name], case), script)
    assert largest_error(trained, plain_state(KINDS[name], case)) < EXACT


@pytest.mark.parametrize("method", ["fl", "sfl"])
@pytest.mark.parametrize("name", ["pixels", "mse", "own count", "own"])
def test_other_methods_train_the_same_weights(name: str, method: str) -> None:
    case = Case(method, (2,), sizes=SIZES, batch_size=5, momentum="keep")
    trained = train_workload(workload(KINDS[name], case))
    assert largest_error(trained.state, plain_state(KINDS[name], case)) < EXACT


@pytest.mark.slow
def test_pieces_weighted_by_their_samples_would_be_detected() -> None:
    """The mean over pieces of the means over their tokens is another loss."""
    kind, case = KINDS["next_token"], Case("pipar", (1,), (3,), sizes=SIZES, batch_size=5)

    def by_pieces(output: Tensor, targets: Tensor) -> Tensor:
        pieces = zip(output.tensor_split(3), targets.tensor_split(3), strict=True)
        return torch.stack(
            [kind.plain(*piece) * len(piece[1]) / len(targets) for piece in pieces if len(piece[1])]
        ).sum()

    trained = train_workload(workload(kind, case))
    wrong = plain_state(Kind(kind.network, kind.item, by_pieces, kind.task), case)
    assert largest_error(trained.state, wrong) > 1e-6


@pytest.mark.parametrize("name", ["pixels", "next_token", "own count", "own"])
def test_kept_activations_come_back_with_their_targets_and_counts(name: str) -> None:
    """A device with frozen layers sends its activations once; later epochs only refer to them, in another order."""
    kind, case = KINDS[name], Case("pipar", (1,), (3,), sizes=SIZES, batch_size=5, epochs=3, freeze=("0.*",))
    trained = train_workload(workload(kind, case))
    assert largest_error(trained.state, plain_state(kind, case)) < EXACT
    plain = train_workload(workload(kind, replace(case, cache=0)))
    pairs = list(zip(trained.epochs, plain.epochs, strict=True))
    assert all(kept.bytes_up < sent.bytes_up for kept, sent in pairs[1:])
