"""All tensors that a learner resumes from, as one safetensors body inside a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pipar.errors import InputError, ProtocolError
from pipar.tensors.bodies import read_state, state_body
from pipar.wire.messages import Body

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Snapshot:
    """The tensors by kind; a name in the body starts with its kind, as in "model.0.weight"."""

    model: Tensors
    random: torch.Tensor  # state of torch's default generator, which dropout uses
    optimizer: Mapping[str, Tensors] = field(default_factory=dict)  # of the replicas, by device; "" for a shared one
    aggregator: Tensors = field(default_factory=dict)  # its state between rounds

    def pack(self) -> Body:
        """Return all tensors as one body, without copying; except optimiser state, which is modified in place."""
        named = {f"model.{name}": tensor for name, tensor in self.model.items()}
        for device, state in self.optimizer.items():
            # A slash, because names of devices and of weights may contain dots.
            named |= {f"optimizer.{device}/{place}": tensor.clone() for place, tensor in state.items()}
        named |= {f"aggregator.{name}": tensor for name, tensor in self.aggregator.items()}
        return state_body({**named, "random.torch": self.random})

    @classmethod
    def read(cls, body: Body) -> Snapshot:
        """Return the snapshot that `pack` wrote; raise InputError if the body is not one."""
        try:
            named = read_state(body)
        except ProtocolError:
            raise InputError(
                "The checkpoint's tensors are not valid safetensors: resume from another checkpoint."
            ) from None
        random, wanted = named.get("random.torch"), torch.get_rng_state()
        if random is None or (random.shape, random.dtype) != (wanted.shape, wanted.dtype):
            raise InputError(
                "The checkpoint has no random state that this version of torch accepts: use another checkpoint."
            )
        # Before there were other optimisers than SGD, a checkpoint had the momentum of each weight.
        momentum = {f"{name}/momentum_buffer": tensor for name, tensor in _below("momentum.", named).items()}
        optimizer: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in (momentum | _below("optimizer.", named)).items():
            device, _, place = name.partition("/")
            optimizer.setdefault(device, {})[place] = tensor
        return cls(_below("model.", named), random, optimizer, _below("aggregator.", named))


def _below(prefix: str, named: Tensors) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in named.items() if name.startswith(prefix)}
