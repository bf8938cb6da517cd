"""Optimisers of parts: what a factory may return, and what cannot train a network in two places."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from pipar.errors import ConfigError, InputError, ProtocolError
from pipar.nn.eager_optimizers import eager
from pipar.nn.optimizers import OptimizerSettings, PartOptimizer, moved_state, saved_state, sgd
from pipar.settings.optimizers import OPTIMIZERS

Named = list[tuple[str, nn.Parameter]]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class ByOneNorm(torch.optim.SGD):
    """Divides each gradient by the norm of all of them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
        for weight in weights:
            weight.grad.div_(norm)
        super().step(closure)


class ClippingByOneNorm(torch.optim.SGD):
    """Clips by the norm of all gradients, which shows only if that is large."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([weight for group in self.param_groups for weight in group["params"]], 1e3)
        super().step(closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_with_a_name_couples_parameters(name: str) -> None:
    """So that only a user's own is tried out for that."""
    kind = getattr(torch.optim, OPTIMIZERS[name].class_name)

    def make(named: Named) -> torch.optim.Optimizer:
        return eager(kind)([one for _, one in named], lr=0.01, **OPTIMIZERS[name].arguments)

    matrices = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))
    OptimizerSettings(factory=make).check(matrices)


class Counting(torch.optim.SGD):
    """Keeps a number and a list, which are no tensors."""

    keeps: Any = 1.5

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["count"] = self.keeps


def of(kind: type[torch.optim.Optimizer], **arguments: Any) -> Callable[[Named], torch.optim.Optimizer]:
    return lambda named: kind([weight for _, weight in named], **arguments)


def adamw_without_decay_of_biases(named: Named) -> torch.optim.Optimizer:
    groups = [
        {"params": [weight for name, weight in named if not name.endswith("bias")]},
        {"params": [weight for name, weight in named if name.endswith("bias")], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups)


def test_a_factory_gets_parameters_with_names_and_may_make_groups() -> None:
    settings = OptimizerSettings(factory=adamw_without_decay_of_biases)
    settings.check(network())
    steps = settings.over(network())
    assert isinstance(steps, PartOptimizer)
    assert steps.largest("weight_decay") == 0.01
    assert settings.state_copies(network()) == pytest.approx(2.0, rel=0.3)  # and a counter for each parameter


def raising(_: Named) -> torch.optim.Optimizer:
    raise KeyError("no such layer")


def only_weights(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([weight for name, weight in named if name.endswith("weight")] or [named[0][1]])


WRONG: list[tuple[Any, str]] = [
    (of(ByOneNorm, lr=0.1), "an optimiser that couples parameters cannot train a network with layers on two"),
    (of(ClippingByOneNorm, lr=0.1), "an optimiser that couples parameters cannot train a network with layers on"),
    (of(torch.optim.LBFGS), "returned LBFGS, which evaluates the loss several times a step"),
    (of(torch.optim.SparseAdam), "returned SparseAdam, which takes sparse gradients only"),
    (lambda _: "sgd", "returned str, not a torch.optim.Optimizer"),
    (raising, "cannot be made: KeyError: 'no such layer'."),
    (only_weights, "must give every parameter to its optimiser exactly once"),
    ("no_such_module:make", "no module 'no_such_module' is installed"),
]


@pytest.mark.parametrize(("factory", "sentence"), WRONG)
def test_a_factory_that_cannot_train_a_network_in_two_places_is_refused(factory: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        OptimizerSettings(factory=factory).check(network())
    assert sentence in str(refused.value)


def test_arguments_that_torch_refuses_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^optimizer.name = 'adam' cannot be made: ValueError: Invalid beta"):
        OptimizerSettings("adam", arguments={"betas": (1.5, 0.9)}).check(network())
    with pytest.raises(ConfigError, match=r"^optimizer.name = 'muon' cannot be made: ValueError: Muon only"):
        OptimizerSettings("muon").check(network())


def test_numbers_in_the_state_of_an_own_optimiser_move_as_numbers() -> None:
    settings = OptimizerSettings(factory=of(Counting, momentum=0.9))
    settings.check(network())
    first, second = (settings.over(network()) for _ in range(2))
    assert first is not None
    assert second is not None
    stepped(first)
    second.load(first.state())
    assert {place for place in first.state() if place.startswith("0.")} == {
        "0.weight/momentum_buffer", "0.weight/count=", "0.bias/momentum_buffer", "0.bias/count=",
    }  # fmt: skip
    assert type(next(iter(second._torch.state.values()))["count"]) is float


def stepped(steps: PartOptimizer) -> None:
    for weight in steps._named.values():
        weight.grad = torch.ones_like(weight)
    steps.step()


def test_state_that_is_neither_a_tensor_nor_a_number_is_refused() -> None:
    class Listing(Counting):
        keeps: ClassVar[list[int]] = [1, 2]

    with pytest.raises(ConfigError, match=r"keeps 'count' of '0.weight' as list, but only tensors and numbers can be"):
        OptimizerSettings(factory=of(Listing)).check(network())


def adam_state(changes: Iterable[tuple[str, torch.Tensor | None]] = ()) -> dict[str, torch.Tensor]:
    settings, module = OptimizerSettings("adam"), network()
    steps = settings.over(module)
    assert steps is not None
    stepped(steps)
    state = steps.state()
    for place, tensor in changes:
        if tensor is None:
            del state[place]
        else:
            state[place] = tensor
    return state


@pytest.mark.parametrize(
    ("place", "tensor"),
    [
        ("0.weight/exp_avg", None),  # half a state would fail in the middle of a step
        ("0.weight/exp_avg", torch.zeros(3)),
        ("0.weight/exp_avg", torch.zeros(4, 3, dtype=torch.float64)),
        ("0.weight/step", torch.zeros(1000)),
        ("0.weight/momentum_buffer", torch.zeros(4, 3)),
        ("5.weight/exp_avg", torch.zeros(4, 3)),
        ("exp_avg", torch.zeros(4, 3)),
    ],
)
def test_state_that_does_not_fit_is_refused(place: str, tensor: torch.Tensor | None) -> None:
    own, settings = dict(network().named_parameters()), OptimizerSettings("adam")
    assert moved_state(adam_state(), own, settings)
    with pytest.raises(ProtocolError, match="does not fit the layers that moved"):
        moved_state(adam_state([(place, tensor)]), own, settings)
    if place.startswith("0."):  # of other layers, a checkpoint may have more
        with pytest.raises(InputError, match="does not fit this network"):
            saved_state(adam_state([(place, tensor)]), own, settings)


def test_a_checkpoint_of_another_optimiser_is_refused() -> None:
    with pytest.raises(InputError, match=r"optimiser state .* resume with the \[optimizer\] that the training had"):
        saved_state(adam_state(), dict(network().named_parameters()), sgd())
