"""Cutting a network after layer P, and joining the states of its two parts again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from torch import Tensor, nn

from pipar.cutting.stage_line import Line
from pipar.errors import PlanError


def layer_count(model: nn.Sequential) -> int:
    """Return Q, the number of layers; the network can be cut after each of them."""
    return len(model)


def named_layers(model: nn.Sequential) -> dict[str, nn.Module]:
    """Return the layers in their order; a layer that occurs twice has both of its names."""
    if isinstance(model, Line):
        return dict(model.stages)
    return {name: layer for name, layer in model._modules.items() if layer is not None}


def whole_module(model: nn.Sequential) -> nn.Module:
    """Return the module to evaluate: the user's own, where stages were made of it for training."""
    return model.whole if isinstance(model, Line) else model


def layer_bytes(model: nn.Sequential) -> list[int]:
    """Return the bytes of each layer's weights and buffers."""
    if isinstance(model, Line):
        return [model.owned_bytes(name) for name in model.stages]
    return [sum(tensor.nbytes for tensor in layer.state_dict().values()) for layer in named_layers(model).values()]


def split_model(model: nn.Sequential, split_point: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Return (M^c, M^s), device part and server part: layers 1..P and P+1..Q, the second empty for P = Q.

    The parts hold the model's own layers under the model's own names: no weight is copied, and the name of a
    weight does not depend on P.
    """
    layers = layer_count(model)
    if not 1 <= split_point <= layers:
        raise PlanError(
            f"split point {split_point} is outside 1..{layers}: the model has {layers} layers. "
            "For plain federated learning use --method fl."
        )
    names = list(named_layers(model))
    device_part = some_layers(model, names[:split_point])
    server_part = some_layers(model, names[split_point:])
    _refuse_sharing(device_part, server_part, split_point)
    return device_part, server_part


def join_states(device_state: Mapping[str, Tensor], server_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of the whole model, M = M^c (+) M^s, device entries first; the parts must share no name."""
    common = device_state.keys() & server_state.keys()
    if common:
        raise PlanError(
            f"both parts hold {min(common)!r}, one of {len(common)} common names: "
            "only the two parts of one model, cut at one split point, can be joined."
        )
    return {**device_state, **server_state}


def part_of_state(
    state: Mapping[str, Tensor], part: nn.Module, names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Return the entries of a whole model's state that belong to this part, in the part's order, or some of them."""
    names = part.state_dict().keys() if names is None else names
    missing = [name for name in names if name not in state]
    if missing:
        raise PlanError(
            f"the state has no {missing[0]!r}, one of {len(missing)} missing names: it belongs to another model."
        )
    return {name: state[name] for name in names}


def some_layers(model: nn.Sequential, names: Sequence[str]) -> nn.Sequential:
    """Return these layers as a separate network with the same names."""
    if isinstance(model, Line):
        part: nn.Sequential = model if len(names) == len(model) else model.part(names)
    else:
        layers = named_layers(model)
        part = nn.Sequential(OrderedDict((name, layers[name]) for name in names))
    # Not part.train(): that would change the layers, which belong to the model too.
    part.training = model.training
    return part


def _refuse_sharing(device_part: nn.Sequential, server_part: nn.Sequential, split_point: int) -> None:
    """Raise if a layer or a weight is on both sides of the cut: the two copies would diverge."""
    device_side = _members(device_part)
    shared = (name for member, name in _members(server_part).items() if member in device_side)
    name = next(shared, None)
    if name is not None:
        raise PlanError(
            f"{name!r} also occurs before the cut after layer {split_point}, but the two sides must not share layers "
            "or weights: choose another split point, or do not share it."
        )


def _members(part: nn.Sequential) -> dict[int, str]:
    """Return {identity: name} of every module, parameter and buffer inside the part."""
    named = chain(part.named_modules(), part.named_parameters(), part.named_buffers())
    return {id(member): name for name, member in named if member is not part}
