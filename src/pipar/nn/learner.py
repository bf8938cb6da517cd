"""The server's mathematics: the global model, the replicas M^s_k, aggregation and evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from pipar import random_streams
from pipar.errors import InputError, ProtocolError, UnusableModelError
from pipar.nn.aggregators import Aggregator, DeviceModel, FedAvg
from pipar.nn.parts import Optimizer, TorchServerPart
from pipar.nn.runtime import release_model_memory
from pipar.nn.snapshot import Snapshot
from pipar.nn.split import join_states, part_of_state, split_model
from pipar.nn.tensors import changes_body, check_finite, read_state, state_body, weights_sha256
from pipar.wire.messages import Body
from pipar.wire.orders import TrainedPart

#: A held-out set: how many samples each batch has, and a function that loads it.
Batches = Sequence[tuple[int, Callable[[], tuple[torch.Tensor, torch.Tensor]]]]


class TorchLearner:
    """The global model and one server-side replica a device (or one for all, where the method shares it).

    Weights of the global model are replaced by others and never overwritten. So what is sent, validated or saved of it
    is no copy, but the tensors that it consists of at that time.
    """

    def __init__(
        self,
        model: nn.Sequential,
        split_points: Mapping[str, int],
        optimizer: Optimizer,
        *,
        classes: int,
        shares_server_model: bool,
        keep_momentum: bool,
        proximal: float = 0.0,
        seed: int = 0,
        aggregator: Aggregator | None = None,
    ) -> None:
        self.model = model
        self.aggregator = aggregator or FedAvg()
        self._split_points = dict(split_points)
        self._optimizer = optimizer
        self._classes = classes
        self._shared = shares_server_model
        self._keep_momentum = keep_momentum
        self._proximal = proximal
        self._seed = seed
        self._replicas: dict[str, TorchServerPart] = {}
        self._packed: dict[tuple[int, bool], Body] = {}
        self._before: dict[str, torch.Tensor] | None = None  # the global model before this one, if it is kept
        self._momentum: dict[str, torch.Tensor] = {}  # of the shared replica, as the last aggregation left it

    def replica(self, device: str) -> TorchServerPart:
        """Return M^s_k; made from the global model when it is first asked for."""
        key = "" if self._shared else device
        if key not in self._replicas:
            _, module = split_model(self.model, self._split_points[device])
            replica = TorchServerPart(
                copy.deepcopy(module),
                self._optimizer,
                classes=self._classes,
                proximal=self._proximal,
                rounding=partial(random_streams.generator, self._seed, "rounding", key, "down"),
            )
            replica.set_proximal_target(module.state_dict())
            self._replicas[key] = replica
        return self._replicas[key]

    def move_cuts(self, split_points: Mapping[str, int]) -> dict[str, Body]:
        """Cut these devices' networks elsewhere; return the momentum of the layers that go to each, if it is kept.

        Their replicas are made anew from the global model: between two rounds nothing else is in them.
        """
        assert not (self._shared and self._replicas) or set(split_points.values()) <= set(self._split_points.values())
        self._split_points.update(split_points)
        leaving = {device: state_body({}) for device in split_points} if self._keep_momentum else {}
        for device in [name for name in split_points if name in self._replicas]:
            before = self._replicas.pop(device)
            replica = self.replica(device)
            if self._keep_momentum:
                leaving[device] = replica.carry_momentum_from(before)
        return leaving

    def discard_progress(self, device: str) -> None:
        """Discard what a device's replica has learned since the last aggregation.

        A model that all share keeps what it has learned of whole batches; only gradients of half ones are discarded.
        """
        if self._shared:
            for replica in self._replicas.values():
                replica.discard()
        else:
            self._replicas.pop(device, None)

    def keep_replicas_of(self, devices: Collection[str]) -> None:
        """Free the replicas of all other devices; of one that is shared, what it has to make up for to them."""
        for device in [] if self._shared else self._replicas.keys() - set(devices):
            del self._replicas[device]
        for replica in self._replicas.values():
            replica.keep_errors_of(devices)

    def rewind_shared_model(self) -> None:
        """Put a model that all share back to what the last aggregation left: weights, buffers and momentum."""
        for replica in self._replicas.values() if self._shared else ():
            # The global model has had the same weights since then: only momentum needs a copy.
            replica.install(part_of_state(self.model.state_dict(), replica.module), keep_momentum=False)
            replica.restore_momentum(self._momentum)
            replica.discard()

    def restore_point(self) -> Callable[[], None]:
        """Return what puts the global model back to what it is now; as long as somebody has that, there are two."""
        return partial(self._load, self.state())

    def pack(self, device: str, *, changes: bool = False) -> Body:
        """Return the device's part of the global model, as it is now, or what has changed in it since the one before.

        Devices with one split point share the bytes.
        """
        key = (self._split_points[device], changes)
        if key not in self._packed:
            part, _ = split_model(self.model, key[0])
            state = part.state_dict()
            if changes and self._before is not None:
                self._packed[key] = changes_body(state, {name: self._before[name] for name in state})
            else:
                self._packed[key] = state_body(state)
        return self._packed[key]

    def decode(self, device: str, body: Body) -> dict[str, torch.Tensor]:
        """Return the tensors of the part that a device brings back; who brings back no model is named."""
        part, _ = split_model(self.model, self._split_points[device])
        try:
            return read_state(body, part.state_dict())
        except ProtocolError as error:
            raise UnusableModelError(device, f"{device} brought back no model: {error}") from None

    def aggregate(self, returned: Sequence[TrainedPart], *, keep_before: bool = False) -> None:
        """Make the new global model of what the devices brought back and of their replicas, in device-name order.

        The one before is kept if somebody is to be told what has changed since then.
        """
        self._before = None  # who still has that one is sent the new one whole
        before = self.state() if keep_before else None
        ordered = sorted(returned, key=lambda back: back.device)
        self._packed.clear()  # parts of the model before; if one is needed after all, it is packed again
        if self._shared:
            part, rest = split_model(self.model, self._split_points[ordered[0].device])
            aggregated = self._aggregated(part, _Brought(ordered, self._device_state))
            replica = self.replica(ordered[0].device)
            self._load(join_states(aggregated, replica.state()))
            replica.set_proximal_target(rest.state_dict())  # nothing is installed into it
            self._momentum = {name: momentum.clone() for name, momentum in replica.momentum().items()}
        else:
            self._load(self._aggregated(self.model, _Brought(ordered, self._whole)))
            for back in ordered:
                replica = self.replica(back.device)
                state = part_of_state(self.model.state_dict(), replica.module)
                replica.install(state, keep_momentum=self._keep_momentum)
        self._before = before

    def _aggregated(self, module: nn.Module, brought: _Brought) -> dict[str, torch.Tensor]:
        # A weight that two layers share has two names in a state.
        parameters = frozenset(name for name, _ in module.named_parameters(remove_duplicate=False))
        return self.aggregator.aggregate(module.state_dict(), brought, parameters)

    def _whole(self, back: TrainedPart) -> dict[str, torch.Tensor]:
        replica = self.replica(back.device).state()
        _check_finite(back.device, replica, f"What {back.device} has made of the layers behind its cut")
        return join_states(self._device_state(back), replica)

    def _device_state(self, back: TrainedPart) -> dict[str, torch.Tensor]:
        part, _ = split_model(self.model, self._split_points[back.device])
        given = part.state_dict()
        state = self.decode(back.device, back.body) if back.state is None else back.state
        wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in given.items()}
        if {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} != wanted:
            raise UnusableModelError(
                back.device, f"{back.device} brought back a model that is not the part it was given."
            )
        _check_finite(back.device, state, f"The model that {back.device} brought back")
        return state

    @torch.no_grad()
    def _load(self, state: Mapping[str, torch.Tensor]) -> None:
        self._before = None
        tensors = [*self.model.parameters(), *self.model.buffers()]
        outlines = [tensor.to("meta") for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.new_empty(0)  # whoever still reads the old one keeps it
        # New tensors seldom fit where old ones of the same size were: the allocator aligns them by other borders.
        release_model_memory(sum(outline.nbytes for outline in outlines))
        for tensor, outline in zip(tensors, outlines, strict=True):
            tensor.data = torch.empty_like(outline, device=tensor.device)
        self.model.load_state_dict(state)
        self._packed.clear()

    def evaluator(self) -> Callable[[Callable[[], tuple[torch.Tensor, torch.Tensor]]], tuple[float, int]]:
        """Return a function that gives summed loss and correct answers of a batch for the model as it is now."""
        # Weights are shared. A buffer is copied: forwards of a network may write to it.
        weights = {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in self.model.parameters()}
        model = copy.deepcopy(self.model, weights).eval()
        return lambda load: evaluate_batch(model, *load())

    def part_bytes(self, device: str) -> int:
        """Return the size of the device's part."""
        part, _ = split_model(self.model, self._split_points[device])
        return sum(tensor.nbytes for tensor in part.state_dict().values())

    def model_bytes(self) -> int:
        """Return the size of the whole model."""
        return sum(tensor.nbytes for tensor in self.state().values())

    def state(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def packed_state(self) -> Body:
        """Return the global model as a safetensors file."""
        return state_body(self.state())

    def sha256(self) -> str:
        return weights_sha256(self.state())

    # --- to go on from later

    def snapshot(self) -> Body:
        """Return all that training goes on from: the global model, momentum of replicas, random numbers.

        To be called when a round is aggregated and before a replica serves the next one, in whichever thread: nothing
        may change while this runs. Afterwards everything may: the global model gets other tensors, and what is changed
        in place was copied.
        """
        momentum = {}
        if self._momentum_stays:
            momentum = {key: state for key, replica in self._replicas.items() if (state := replica.momentum())}
        return Snapshot(self.state(), torch.get_rng_state(), momentum, self.aggregator.state()).pack()

    def restore(self, body: Body) -> None:
        """Go on from what `snapshot` gave of a learner of the same network, cut in the same places.

        Replicas are made anew from the global model: between two rounds there is nothing else in them but momentum.
        That of layers which are on a device now is left out. If the body is of another network, an InputError says so
        and nothing is changed.
        """
        snapshot = Snapshot.read(body)
        _refuse_another_network(snapshot.model, self.state())
        self._load(snapshot.model)
        self._replicas.clear()
        self._momentum = dict(snapshot.momentum.get("", {}))
        for key, momentum in snapshot.momentum.items() if self._momentum_stays else ():
            device = next(iter(self._split_points)) if self._shared else key
            if device in self._split_points:
                self.replica(device).restore_momentum(momentum)
        self.aggregator.load_state(snapshot.aggregator)
        torch.set_rng_state(snapshot.random)

    @property
    def _momentum_stays(self) -> bool:
        # That of a shared model always does: its weights are never replaced by an average.
        return self._keep_momentum or self._shared


def _check_finite(device: str, state: Mapping[str, torch.Tensor], what: str) -> None:
    try:
        check_finite(state.values(), what)
    except ProtocolError as error:
        raise UnusableModelError(device, str(error)) from None


def _refuse_another_network(given: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    for name in (*own, *given):
        if name not in given or name not in own:
            raise InputError(f"The checkpoint is of another network: only one of the two has {name!r}.")
        if (given[name].shape, given[name].dtype) != (own[name].shape, own[name].dtype):
            there, here = (f"{tuple(state[name].shape)} in {state[name].dtype}" for state in (given, own))
            raise InputError(f"The checkpoint is of another network: there {name!r} is {there}, here it is {here}.")


@dataclass(frozen=True)
class _Brought:
    """What the devices brought back, in device-name order; each model is read when its turn comes."""

    ordered: Sequence[TrainedPart]
    read: Callable[[TrainedPart], dict[str, torch.Tensor]]

    def __len__(self) -> int:
        return len(self.ordered)

    def __iter__(self) -> Iterator[DeviceModel]:
        for back in self.ordered:
            yield DeviceModel(back.device, self.read(back), back.samples)


@torch.no_grad()
def evaluate_batch(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
    """Return the loss summed over the samples and how many of them were answered right."""
    output = model(inputs)
    loss = F.cross_entropy(output, labels, reduction="sum")
    return loss.item(), int((output.argmax(dim=1) == labels).sum())
