"""Cutting a network behind layer P, and joining the states of its two parts again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain

from torch import Tensor, nn

from pipar.errors import PlanError


def layer_count(model: nn.Sequential) -> int:
    """Return Q, the number of layers that the network can be cut behind."""
    return len(model)


def split_model(model: nn.Sequential, split_point: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Return (device part, server part): layers 1..P and P+1..Q, the second empty for P = Q.

    The parts hold the model's own layers under the model's own names: no weight is copied, and the name of a
    weight does not depend on P.
    """
    layers = layer_count(model)
    if not 1 <= split_point <= layers:
        raise PlanError(
            f"split point {split_point} is outside 1..{layers}: the model has {layers} layers. "
            "For plain federated learning use --method fl."
        )
    # named_children() would leave out a layer that occurs twice.
    children = list(model._modules.items())
    device_part = _part(children[:split_point], training=model.training)
    server_part = _part(children[split_point:], training=model.training)
    _refuse_sharing(device_part, server_part, split_point)
    return device_part, server_part


def join_states(device_state: Mapping[str, Tensor], server_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of the whole model, the device's entries first; the parts may have no name in common."""
    common = device_state.keys() & server_state.keys()
    if common:
        raise PlanError(
            f"both parts hold {min(common)!r}, one of {len(common)} common names: "
            "join the two parts of one model that was cut at one split point."
        )
    return {**device_state, **server_state}


def part_of_state(state: Mapping[str, Tensor], part: nn.Module) -> dict[str, Tensor]:
    """Return the entries of a whole model's state that belong to this part, in the part's order."""
    names = part.state_dict().keys()
    missing = [name for name in names if name not in state]
    if missing:
        raise PlanError(
            f"the state has no {missing[0]!r}, one of {len(missing)} missing names: "
            "it belongs to another model than the part."
        )
    return {name: state[name] for name in names}


def _part(children: Sequence[tuple[str, nn.Module | None]], *, training: bool) -> nn.Sequential:
    """Return these layers as a network of their own, their names kept."""
    part = nn.Sequential(OrderedDict((name, layer) for name, layer in children if layer is not None))
    # Not part.train(): that would reach into the layers, which belong to the model too.
    part.training = training
    return part


def _refuse_sharing(device_part: nn.Sequential, server_part: nn.Sequential, split_point: int) -> None:
    """Raise if a layer or a weight lies on both sides of the cut, where the two copies would drift apart."""
    device_side = _members(device_part)
    shared = (name for member, name in _members(server_part).items() if member in device_side)
    name = next(shared, None)
    if name is not None:
        raise PlanError(
            f"{name!r} also occurs in front of the cut behind layer {split_point}: each side needs layers and "
            "weights of its own, so choose another split point or do not share it."
        )


def _members(part: nn.Sequential) -> dict[int, str]:
    """Return {identity: name} of every module, parameter and buffer inside the part."""
    named = chain(part.named_modules(), part.named_parameters(), part.named_buffers())
    return {id(member): name for name, member in named if member is not part}
