"""Parameters that are not trained: which they are, and the state of a network without them.

A frozen parameter has `requires_grad=False`. It never changes, so it is sent once, and neither averaged nor sent back.
Buffers are never frozen: a forward in train mode may change them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from pipar.cutting.split import named_layers
from pipar.errors import ModelError
from pipar.tensors.inputs import Inputs, call


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match a pattern, as in "layer1.*"; raise ModelError if one matches none."""
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matching = [weight for name, weight in named if fnmatchcase(name, pattern)]
        if not matching:
            raise ModelError(
                f"model.freeze has '{pattern}', which matches no parameter of the network: its parameters are "
                f"{_some(name for name, _ in named)}."
            )
        for weight in matching:
            weight.requires_grad_(False)


def check_trains(model: nn.Module) -> None:
    """Raise ModelError if the network has parameters and all of them are frozen."""
    weights = list(model.parameters())
    if weights and not any(weight.requires_grad for weight in weights):
        raise ModelError("all parameters of the network are frozen: leave at least one to train.")


def check_stays_frozen(model: nn.Module, example: Inputs) -> None:
    """Raise ModelError if a forward of this batch in train mode changes a frozen parameter without any notice."""
    if not frozen_names(model):
        return
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        used = copy.deepcopy(model).train()
        call(used, example)
    after, frozen = dict(used.named_parameters()), frozen_names(model)
    for name, before in model.named_parameters():
        if name in frozen and not torch.equal(before, after[name]):
            raise ModelError(
                f"'{name}' has requires_grad=False, but the network changes it in its forward: register it as a "
                "buffer, which is averaged."
            )


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that are not trained; a shared one has all of its names."""
    named = module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, weight in named if not weight.requires_grad)


def changing_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module without its frozen parameters: what is averaged and sent after a round."""
    frozen = frozen_names(module)
    return {name: tensor for name, tensor in module.state_dict().items() if name not in frozen}


def frozen_bytes(module: nn.Module) -> int:
    """Return the bytes of the frozen parameters."""
    frozen = frozen_names(module)
    return sum(tensor.nbytes for name, tensor in module.state_dict().items() if name in frozen)


def frozen_layers(model: nn.Sequential) -> int:
    """Return how many layers are before the first one with a trained parameter."""
    for number, layer in enumerate(named_layers(model).values()):
        if any(weight.requires_grad for weight in layer.parameters()):
            return number
    return len(named_layers(model))


def _some(names: Iterable[str]) -> str:
    first, *others = [*names] or ["none"]
    return f"'{first}', ..., '{others[-1]}'" if others else f"'{first}'"
