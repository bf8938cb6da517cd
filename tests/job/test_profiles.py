"""What is known of a network without measuring it: its work, and what encodings leave at its cuts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipar.job.passed_function import PassedFunction
from pipar.job.profiles import _functions_key, count_network
from pipar.job.user_objects import UserObjects
from pipar.job.workload import Workload
from pipar.profiling.operation_counts import known_counts, known_shares
from pipar.settings.config_file import config_from


class Residual(nn.Module):
    """Half of what a ReLU gives is zero; of what a linear layer gives, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x.flatten(1)))
        logits: Tensor = self.head(hidden + self.second(hidden))
        return logits


def workload(model: nn.Module | None = None, **data: Any) -> Workload:
    tree = {"data": {"name": "synthetic", "samples_per_device": 4, **data}, "devices": [{"count": 1}]}
    config = config_from(tree)
    return Workload(config, None if model is None else UserObjects.of(config, model, None, None, None))


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.slow
def test_the_encodings_of_an_own_network_are_tried_on_samples() -> None:
    of = workload(Residual(), shape=[1, 8, 8])
    *cuts, last = count_network(of, of.checked_model())
    after_relu = next(cut for cut in cuts if cut.rectified)
    assert 0.3 < after_relu.shares["sparse"][0] < 0.8
    assert all(0 < share <= 1 for cut in cuts for both in cut.shares.values() for share in both)
    assert not any("sparse" in cut.shares for cut in cuts if not cut.rectified)
    assert last.shares == {}


@pytest.mark.slow
def test_trying_encodings_changes_neither_the_network_nor_random_numbers() -> None:
    of = workload(Residual(), shape=[1, 8, 8])
    model = of.checked_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    count_network(of, model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.slow
def test_a_network_of_pipar_has_the_same_shares_for_images_of_any_shape() -> None:
    of = workload(shape=[3, 20, 20])
    assert known_counts("vgg5", "group", (3, 20, 20), 10) is None
    counts = count_network(of, of.checked_model())
    assert [layer.shares for layer in counts[:-1]] == known_shares("vgg5", "group")


def made_by(optimizer: Any) -> dict[str, object]:
    config = config_from({"optimizer": {"factory": "own:make"}})
    return _functions_key(Workload(config, UserObjects(optimizer=PassedFunction(optimizer))))


class Maker:
    """An object that makes optimisers."""

    def __init__(self, amsgrad: bool) -> None:
        self.amsgrad = amsgrad

    def __call__(self, named: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(named, amsgrad=self.amsgrad)


def test_measured_times_are_kept_for_the_code_of_an_optimizer_and_not_for_its_name() -> None:
    def make(named: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(named)

    first = make

    def make(named: Any) -> torch.optim.Optimizer:  # type: ignore[no-redef]  # as in a cell that was edited
        return torch.optim.SGD(named)

    adam, sgd = partial(torch.optim.Adam, lr=0.1), partial(torch.optim.SGD, lr=0.1)
    keys = [made_by(one) for one in (first, make, adam, sgd, torch.optim.Adam, Maker(True), Maker(False))]
    assert [keys.index(key) for key in keys] == list(range(len(keys)))
    assert made_by(first) == keys[0]
    assert made_by(Maker(True)) == made_by(Maker(True))
