"""The weights that a training starts from, read from a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from pipar.errors import ModelError, ProtocolError
from pipar.tensors.bodies import read_state
from pipar.wire.messages import Body


@torch.no_grad()
def load_weights(model: nn.Module, file: str) -> None:
    """Copy the tensors of a safetensors file into a network, in the network's own dtype.

    The file has exactly the names and shapes of the network's state; of a weight with several names, one is enough.
    Otherwise raise ModelError with the first difference, and change nothing.
    """
    given, own = _read(file), model.state_dict(keep_vars=True)
    difference = _difference(given, own)
    if difference is not None:
        raise ModelError(f"model.weights = {file!r} does not fit the network: {difference}.")
    for name, tensor in given.items():
        own[name].copy_(tensor)


def _read(file: str) -> dict[str, Tensor]:
    path = Path(file)
    try:
        return read_state(Body.of(bytearray(path.read_bytes()), encoding="safetensors"))
    except OSError as error:
        raise ModelError(f"model.weights = {file!r} cannot be read: {error.strerror}.") from None
    except ProtocolError:
        raise ModelError(
            f"model.weights = {file!r} is not a safetensors file: write one with safetensors.torch.save_file, or take "
            "the model.safetensors of a run."
        ) from None


def _difference(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str | None:
    """Return the first difference between a file and a network, in the network's order; None if there is none."""
    found = {id(own[name]): name for name in given if name in own}
    for name, tensor in own.items():
        if id(tensor) not in found:
            return f"the file has no '{name}', which is {_outline(tensor)} in the network"
        if name not in given:
            continue
        if (given[name].shape, given[name].is_floating_point()) != (tensor.shape, tensor.is_floating_point()):
            return f"its '{name}' is {_outline(given[name])}, but that of the network is {_outline(tensor)}"
        other = found[id(tensor)]
        if not torch.equal(given[name], given[other]):
            return f"'{name}' and '{other}' are one weight of the network, but have different values in the file"
    extra = next((name for name in given if name not in own), None)
    return None if extra is None else f"the network has no '{extra}', which is {_outline(given[extra])} in the file"


def _outline(tensor: Tensor) -> str:
    return f"{'x'.join(map(str, tensor.shape)) or 'a number'} in {str(tensor.dtype).removeprefix('torch.')}"
