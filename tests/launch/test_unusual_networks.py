"""Networks that do what few do train the weights of plain training, or are labelled statistical."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import reference
from support.networks import Applied, Keeping, Restoring
from support.training import EXACT, Case, largest_error, reference_data, train_in_virtual_time
from torch import Tensor, nn

from pipar.errors import ModelError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


class Layers(nn.Module):
    """What the networks here are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)


class Placed(Layers):
    """Adds to each sample its place in the batch."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.flatten(1)))
        return self.head(torch.tanh(hidden + torch.arange(hidden.shape[0]).unsqueeze(1) / 10))


class Clipped(Layers):
    """Keeps its weights small, also when it is evaluated."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.1, 0.1)
        return self.head(torch.tanh(self.first(x.flatten(1))))


class Bounded(nn.Module):
    """Torch's own way to do that."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 8, max_norm=0.5), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens((x.squeeze(1).sum(-1) * 3).long().remainder(7))).sum(1))


class Detached(Layers):
    """Its first two layers get no gradient, which only the last of them shows."""

    def forward(self, x: Tensor) -> Tensor:
        fixed = torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))).detach()
        return self.head(torch.tanh(self.third(fixed)))


class Chosen(Layers):
    """The same by an operation that has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        best = self.second(torch.tanh(self.first(x.flatten(1)))).argmax(1)
        return self.head(torch.tanh(self.third(nn.functional.one_hot(best, 8).to(x.dtype))))


class Transformed(Layers):
    """Complex numbers cross some places."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.flatten(1)))
        return self.head(torch.tanh(self.third(torch.fft.ifft(torch.fft.fft(hidden) * 2).real)))


class Checkpointed(Layers):
    """Computes a part again in its backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.flatten(1)))
        return self.head(hidden + torch.utils.checkpoint.checkpoint(self.second, hidden, use_reentrant=False))


class Seen(Layers):
    """A layer sees what another one has kept in an attribute."""

    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.first(x.flatten(1))
        return self.head(torch.tanh(self.second(torch.tanh(self.kept))) + self.kept)


def through_an_object() -> nn.Sequential:
    shared: dict[str, Tensor] = {}
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 8), Keeping(shared), nn.Tanh(), nn.Linear(8, 8), Restoring(shared), nn.Linear(8, 10)
    )


class Again(nn.Module):
    """Uses a layer of another module, without having it as a child."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = [layer]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def through_a_hidden_layer() -> nn.Sequential:
    layer = nn.Linear(8, 8)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), layer, nn.Tanh(), Again(layer), nn.Linear(8, 10))


def with_sequence_first() -> nn.Sequential:
    rows, states = Applied(lambda x: x.squeeze(1).transpose(0, 1)), Applied(lambda given: given[0].mean(0))
    return nn.Sequential(rows, nn.Linear(4, 8), nn.Tanh(), nn.GRU(8, 8), states, nn.Linear(8, 10))


NETWORKS: list[Callable[[], nn.Module]] = [
    Placed, Clipped, Bounded, Detached, Chosen, Transformed, Checkpointed, Seen,
    through_an_object, through_a_hidden_layer, with_sequence_first,
]  # fmt: skip


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.__name__)
def test_a_network_trains_the_weights_of_plain_training_or_says_that_it_does_not(make: Callable[[], nn.Module]) -> None:
    case = Case("pipar", sizes=(23, 7), weight_decay=0.1)
    try:
        layers = len(case.workload(made(make)).build_model())
    except ModelError:  # it says so, and can be trained whole
        layers, case = 1, Case("pipar", sizes=(23, 7), weight_decay=0.1, cut_points=())
    expected = reference.train("fl", made(make).double(), reference_data(case.workload(made(make))), 0, case.rules())
    for split_point in range(1, layers + 1):
        for pieces in (1, 3) if split_point < layers else (1,):
            fields = {**case.__dict__, "split_points": (split_point,), "micro_batches": (pieces,)}
            trained = train_in_virtual_time(Case(**fields), made(make))
            is_exact = trained.job.equivalence == "exact"
            assert is_exact or pieces > 1
            assert largest_error(trained.state, expected) < EXACT or not is_exact


@pytest.mark.parametrize("make", [through_an_object, through_a_hidden_layer], ids=lambda make: make.__name__)
def test_cuts_of_a_sequence_that_would_train_other_weights_are_listed_as_withdrawn(
    make: Callable[[], nn.Module],
) -> None:
    cuts = Case("pipar").workload(made(make)).cuts()
    assert {one.reason for one in cuts.not_offered} == {"a step through it differs from that of the uncut network"}


class Stateful(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None: ...


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (lambda: Stateful(16, 10), r"state_dict\(\) has '1\._extra_state', a dict, but only tensors can be averaged"),
        (lambda: torch.jit.script(nn.Linear(16, 10)), "has a module of torch.jit, which cannot be copied"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_network_that_cannot_be_averaged_or_copied_is_refused(module: Callable[[], nn.Module], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        Case("fl").workload(nn.Sequential(nn.Flatten(), module()))
