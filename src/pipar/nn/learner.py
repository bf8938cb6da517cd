"""The server's mathematics: the global model, the replicas M^s_k, aggregation and evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from pipar import random_streams
from pipar.aggregation.aggregators import Aggregator, DeviceModel, FedAvg
from pipar.aggregation.update_check import UpdateCheck, batch_momenta
from pipar.cutting.frozen import changing_state, frozen_layers, frozen_names
from pipar.cutting.placing import placed
from pipar.cutting.split import join_states, part_of_state, split_model, whole_module
from pipar.cutting.stage_line import writes_weights
from pipar.errors import (
    InputError,
    PiparError,
    ProtocolError,
    TrainingError,
    UnusableModelError,
    describe,
    is_lack_of_memory,
)
from pipar.monitored_metric import Monitor
from pipar.nn.kept_activations import KeptActivations
from pipar.nn.optimizers import OptimizerSettings
from pipar.nn.runtime import release_model_memory
from pipar.nn.server_part import TorchServerPart
from pipar.nn.shared_part import SharedServerPart
from pipar.nn.snapshot import Snapshot
from pipar.tasks.evaluation import Evaluator, Load
from pipar.tasks.metrics import NamedMetric
from pipar.tasks.task import Task
from pipar.tensors.bodies import changes_body, check_finite, check_range, read_state, state_body, weights_sha256
from pipar.tensors.torch_device import CPU, TorchDevice
from pipar.wire.messages import EMPTY, Body
from pipar.wire.orders import TrainedPart

#: A held-out set: for each batch its number of samples and a function that loads it.
Batches = Sequence[tuple[int, Load]]


@dataclass(frozen=True)
class LearnerSettings:
    """How the server-side models of one training are trained."""

    optimizer: OptimizerSettings
    task: Task
    shares_server_model: bool = False
    keep_state: bool = False  # of optimisers, over aggregations
    proximal: float = 0.0  # mu of FedProx
    seed: int = 0  # of the rounding in lossy encodings
    trusts_devices: bool = True  # all devices are the program's own
    cache_bytes: int = 0  # of each device's activations that are kept at most
    metrics: Sequence[NamedMetric] = ()  # of held-out sets
    monitor: Monitor = field(default_factory=Monitor)  # which of them the best model goes by
    torch_device: TorchDevice = CPU  # where the replicas are
    at_once: bool = False  # several micro-batches of one device may be computed at the same time
    frozen_layers: int = 0  # first layers without anything to train: their devices need no gradients


class TorchLearner:
    """The global model on the CPU, and one server-side replica per device (or one for all, if the method shares it).

    Tensors of the global model are replaced, never overwritten. So sending, validating and saving it need no copy: they
    use the tensors that it consists of at that time.
    """

    def __init__(
        self,
        model: nn.Sequential,
        split_points: Mapping[str, int],
        settings: LearnerSettings,
        aggregator: Aggregator | None = None,
    ) -> None:
        assert settings.frozen_layers <= frozen_layers(model)
        self.model = model
        self.kept = KeptActivations(settings.cache_bytes, self._part_version, settings.task)
        self.aggregator = aggregator or FedAvg()
        self._split_points = dict(split_points)
        self._settings = settings
        self._shared = settings.shares_server_model
        self._keep_state = settings.keep_state
        self._replicas: dict[str, TorchServerPart] = {}
        self._packed: dict[tuple[int, bool, bool], Body] = {}
        self._packed_to_evaluate: dict[tuple[int, bool], Body] = {}
        self._before: dict[str, torch.Tensor] | None = None  # the previous global model, if it is kept
        self._optimizer_state: dict[str, torch.Tensor] = {}  # of the shared replica, after the last aggregation
        self._updates = None if settings.trusts_devices else UpdateCheck()
        self._frozen: dict[int, torch.Tensor] = {}  # on an accelerator, by the identity of the global model's

    @property
    def torch_device(self) -> TorchDevice:
        """What the replicas compute on."""
        return self._settings.torch_device

    def replica(self, device: str) -> TorchServerPart:
        """Return M^s_k; it is created from the global model on first use."""
        key = "" if self._shared else device
        if key not in self._replicas:
            _, module = split_model(self.model, self._split_points[device])
            replica = (SharedServerPart if self._shared else TorchServerPart)(
                self._copy_of(module),
                self._settings.optimizer,
                task=self._settings.task,
                proximal=self._settings.proximal,
                rounding=partial(random_streams.generator, self._settings.seed, "rounding", key, "down"),
                returns_gradients=self._split_points[device] > self._settings.frozen_layers,
                device=self._settings.torch_device,
                at_once=self._settings.at_once and not self._shared,
            )
            if isinstance(replica, SharedServerPart):
                replica.trusts_devices = self._settings.trusts_devices
            replica.set_proximal_target(module.state_dict())
            self._replicas[key] = replica
        return self._replicas[key]

    def _copy_of(self, module: nn.Sequential) -> nn.Sequential:
        """Return a copy of a part for a replica; replicas share the frozen parameters, which never change."""
        frozen = [weight for weight in module.parameters() if not weight.requires_grad]
        device = self._settings.torch_device
        if device.is_cpu:
            return copy.deepcopy(module, {id(weight): weight for weight in frozen})
        for weight in frozen:
            if id(weight) not in self._frozen:
                self._frozen[id(weight)] = nn.Parameter(device.put(weight.detach()), requires_grad=False)
        return placed(module, device, self._frozen)

    def move_cuts(self, split_points: Mapping[str, int]) -> dict[str, Body]:
        """Change these devices' split points; return the optimiser state of the layers that move to each.

        Their replicas are created again from the global model: between two rounds they hold nothing else.
        """
        assert not (self._shared and self._replicas) or set(split_points.values()) <= set(self._split_points.values())
        self._split_points.update(split_points)
        leaving = {device: state_body({}) for device in split_points} if self._keep_state else {}
        for device in [name for name in split_points if name in self._replicas]:
            before = self._replicas.pop(device)
            replica = self.replica(device)
            if self._keep_state:
                leaving[device] = replica.carry_state_from(before)
        return leaving

    def discard_progress(self, device: str) -> None:
        """Discard what a device's replica has learned since the last aggregation.

        A shared replica keeps its completed batches; only what an unfinished batch has left is discarded.
        """
        self.kept.forget_unfinished(device)
        if self._shared:
            for replica in self._replicas.values():
                replica.discard()
        else:
            self._replicas.pop(device, None)

    def keep_replicas_of(self, devices: Collection[str]) -> None:
        """Free the replicas of all other devices, and what is kept of them; in a shared replica, their residuals."""
        self.kept.keep_only(devices)
        for device in [] if self._shared else self._replicas.keys() - set(devices):
            del self._replicas[device]
        for replica in self._replicas.values():
            replica.keep_errors_of(devices)

    def _part_version(self, device: str) -> str:
        """Return what identifies the part that a device computes with: its layers, and all that may change in them."""
        part, _ = split_model(self.model, self._split_points[device])
        return f"{self._split_points[device]} {weights_sha256(changing_state(part))}"

    def rewind_shared_model(self) -> None:
        """Restore a shared replica to its state after the last aggregation: weights, buffers and optimiser."""
        for replica in self._replicas.values() if self._shared else ():
            # The global model has not changed since then, so only optimiser state had to be copied.
            replica.install(part_of_state(self.model.state_dict(), replica.module), keep_state=False)
            replica.restore_state(self._optimizer_state)
            replica.discard()

    def restore_point(self) -> Callable[[], None]:
        """Return a function that restores the current global model; while it exists, two models are in memory."""
        return partial(self._load, self.state())

    def pack(self, device: str, *, changes: bool = False, frozen: bool = True) -> Body:
        """Return the device's part of the current global model, or its changes since the previous one.

        Without `frozen`, parameters that are not trained are left out: the device has them. Devices with the same
        split point share the bytes.
        """
        key = (self._split_points[device], changes, frozen)
        if key not in self._packed:
            part, _ = split_model(self.model, key[0])
            state = part.state_dict() if frozen else changing_state(part)
            if changes and self._before is not None:
                self._packed[key] = changes_body(state, {name: self._before[name] for name in state})
            else:
                self._packed[key] = state_body(state)
        return self._packed[key]

    def pack_to_evaluate(self, device: str, *, has_part: bool, frozen: bool) -> Body:
        """Return what a device needs of the current global model to evaluate it: all, or the layers after the cut."""
        key = (self._split_points[device] if has_part else 0, frozen)
        if key not in self._packed_to_evaluate:
            state = self.state() if frozen else changing_state(self.model)
            own = split_model(self.model, key[0])[0].state_dict() if has_part else {}
            rest = {name: tensor for name, tensor in state.items() if name not in own}
            self._packed_to_evaluate[key] = state_body(rest) if rest else EMPTY
        return self._packed_to_evaluate[key]

    @property
    def higher_is_better(self) -> dict[str, bool]:
        """Which way each score is better, by its name."""
        named = {metric.name: metric.higher_is_better for metric in self._settings.metrics}
        return {"loss": False, "accuracy": True, **named}

    def decode(self, device: str, body: Body) -> dict[str, torch.Tensor]:
        """Return the tensors of the part that a device returned; raise UnusableModelError if it is not a model."""
        part, _ = split_model(self.model, self._split_points[device])
        try:
            return read_state(body, changing_state(part))
        except ProtocolError as error:
            raise UnusableModelError(device, f"{device} returned no valid model: {error}") from None

    def aggregate(self, returned: Sequence[TrainedPart], *, keep_before: bool = False) -> None:
        """Compute the new global model from the returned parts and their replicas, in device-name order.

        The previous one is kept if devices are to receive only the changes.
        """
        self._before = None  # a device that still has that one receives the whole model
        before = self.state() if keep_before else None
        ordered = sorted(returned, key=lambda back: back.device)
        self._forget_packed()  # parts of the previous model; packed again if still needed
        if self._shared:
            part, rest = split_model(self.model, self._split_points[ordered[0].device])
            aggregated = self._aggregated(part, ordered, self._device_state)
            replica = self.replica(ordered[0].device)
            _check_result(replica.state(), "The shared server-side model")
            self._load(join_states(aggregated, replica.changing_state()))
            replica.set_proximal_target(rest.state_dict())  # nothing is installed into it
            self._optimizer_state = {place: one.clone() for place, one in replica.optimizer_state().items()}
        else:
            self._load(self._aggregated(self.model, ordered, self._whole))
            for back in ordered:
                replica = self.replica(back.device)
                state = part_of_state(self.model.state_dict(), replica.module, changing_state(replica.module))
                replica.install(state, keep_state=self._keep_state)
        if self._updates is not None:
            self._updates.end()
        self._before = before

    def _aggregated(
        self,
        module: nn.Module,
        ordered: Sequence[TrainedPart],
        read: Callable[[TrainedPart], dict[str, torch.Tensor]],
    ) -> dict[str, torch.Tensor]:
        # A weight that two layers share has two names in a state.
        parameters = frozenset(name for name, _ in module.named_parameters(remove_duplicate=False))
        parameters -= frozen_names(module)
        before = changing_state(module)
        momenta = batch_momenta(module)
        returned_models = _ReturnedModels(ordered, read, self._updates, before, parameters, momenta)
        if not before:  # all is frozen, but what devices return is checked
            return dict(next(iter([model.state for model in returned_models])))
        aggregated = self.aggregator.aggregate(before, returned_models, parameters)
        _check_result(aggregated, "The aggregated model")
        return aggregated

    def _whole(self, back: TrainedPart) -> dict[str, torch.Tensor]:
        replica = self.replica(back.device).changing_state()
        _check_returned(back.device, replica, f"The server-side model of {back.device}")
        return join_states(self._device_state(back), replica)

    def _device_state(self, back: TrainedPart) -> dict[str, torch.Tensor]:
        part, _ = split_model(self.model, self._split_points[back.device])
        given = changing_state(part)
        state = self.decode(back.device, back.body) if back.state is None else back.state
        wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in given.items()}
        if {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} != wanted:
            raise UnusableModelError(
                back.device, f"{back.device} returned a model that does not match the part it received."
            )
        _check_returned(back.device, state, f"The model that {back.device} returned")
        return state

    @torch.no_grad()
    def _load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take these tensors into the global model; it keeps its others, such as frozen parameters."""
        self._before = None
        own = self.model.state_dict(keep_vars=True)
        tensors = list({id(own[name]): own[name] for name in state}.values())
        outlines = [tensor.to("meta") for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.new_empty(0)  # views of the old tensor stay valid
        # New tensors seldom fit into the memory of old ones of the same size: their alignment differs.
        release_model_memory(sum(outline.nbytes for outline in outlines))
        for tensor, outline in zip(tensors, outlines, strict=True):
            tensor.data = torch.empty_like(outline, device=tensor.device)
        self.model.load_state_dict(state, strict=False)
        if frozen_names(self.model) & state.keys():
            self._frozen.clear()
        self._forget_packed()

    def _forget_packed(self) -> None:
        self._packed.clear()
        self._packed_to_evaluate.clear()

    def evaluator(self) -> Evaluator:
        """Return what evaluates the current model; it keeps that model while training changes the global one."""
        # Weights are shared; buffers are copied, because a forward may write to them.
        shared = () if writes_weights(self.model) else self.model.parameters()
        weights = {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in shared}
        model = copy.deepcopy(whole_module(self.model), weights).eval()
        return Evaluator(model, self._settings.task, self._settings.metrics, self._settings.monitor)

    def part_bytes(self, device: str, *, frozen: bool = True) -> int:
        """Return the size of the device's part, with or without its frozen parameters."""
        part, _ = split_model(self.model, self._split_points[device])
        return sum(tensor.nbytes for tensor in (part.state_dict() if frozen else changing_state(part)).values())

    def model_bytes(self, *, frozen: bool = True) -> int:
        """Return the size of the whole model, with or without its frozen parameters."""
        return sum(tensor.nbytes for tensor in (self.state() if frozen else changing_state(self.model)).values())

    def state(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def packed_state(self) -> Body:
        """Return the global model as a safetensors file."""
        return state_body(self.state())

    def take_model(self, body: Body) -> None:
        """Make a saved model, as `packed_state` returned it, the global one; raise InputError if it cannot be."""
        try:
            state = read_state(body)
        except ProtocolError:
            raise InputError("It is not a valid safetensors file.") from None
        _refuse_another_network(state, self.state())
        self._load(state)

    def sha256(self) -> str:
        return weights_sha256(self.state())

    # --- checkpoints

    def snapshot(self) -> Body:
        """Return everything that training resumes from: global model, replicas' optimisers, random state.

        Call it after a round is aggregated and before a replica serves the next one, from any thread: nothing may
        change while it runs. Afterwards everything may: the global model gets new tensors, and tensors that are
        modified in place were copied.
        """
        kept = {}
        if self._state_stays:
            kept = {key: state for key, replica in self._replicas.items() if (state := replica.optimizer_state())}
        return Snapshot(self.state(), torch.get_rng_state(), kept, self.aggregator.state()).pack()

    def restore(self, body: Body) -> None:
        """Resume from a `snapshot` of a learner of the same network.

        Replicas are created again from the global model, with their saved optimisers: between two rounds they hold
        nothing else. State of layers that are now on a device is left out. A snapshot of another network raises
        InputError and changes nothing.
        """
        snapshot = Snapshot.read(body)
        _refuse_another_network(snapshot.model, self.state())
        self._load(snapshot.model)
        self._replicas.clear()
        self._optimizer_state = dict(snapshot.optimizer.get("", {}))
        for key, state in snapshot.optimizer.items() if self._state_stays else ():
            device = next(iter(self._split_points)) if self._shared else key
            if device in self._split_points:
                self.replica(device).restore_state(state)
        self.aggregator.load_state(snapshot.aggregator)
        torch.set_rng_state(snapshot.random)

    @property
    def _state_stays(self) -> bool:
        # A shared replica always keeps it: its weights are never replaced by an average.
        return self._keep_state or self._shared


def _check_returned(device: str, state: Mapping[str, torch.Tensor], what: str) -> None:
    try:
        check_range(state.values(), what)
    except ProtocolError as error:
        raise UnusableModelError(device, str(error)) from None


def _check_result(state: Mapping[str, torch.Tensor], what: str) -> None:
    """Raise if a new global model is not finite: it must be neither sent nor saved."""
    try:
        check_finite(state.values(), what)
    except ProtocolError as error:
        raise TrainingError(f"{error} The last saved round is not affected.") from None


def _refuse_another_network(given: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    for name in (*own, *given):
        if name not in given or name not in own:
            raise InputError(f"The checkpoint is of another network: only one of them has {name!r}.")
        if (given[name].shape, given[name].dtype) != (own[name].shape, own[name].dtype):
            there, here = (f"{tuple(state[name].shape)} in {state[name].dtype}" for state in (given, own))
            raise InputError(f"The checkpoint is of another network: its {name!r} is {there}, but here it is {here}.")


@dataclass(frozen=True)
class _ReturnedModels:
    """The returned models in device-name order; each is read only when it is reached.

    The last one is reached only if all are near enough to each other.
    """

    ordered: Sequence[TrainedPart]
    read: Callable[[TrainedPart], dict[str, torch.Tensor]]
    updates: UpdateCheck | None  # None: all devices are trusted
    before: Mapping[str, torch.Tensor]
    parameters: AbstractSet[str]
    momenta: Mapping[str, float | None]  # of layers with batch statistics

    def __len__(self) -> int:
        return len(self.ordered)

    def __iter__(self) -> Iterator[DeviceModel]:
        if self.updates is not None:
            self.updates.begin()
        for back in self.ordered:
            state = self._state(back)
            if self.updates is not None:
                self.updates.add(back.device, state, self.before, self.parameters, back.samples, self.momenta)
                if back is self.ordered[-1]:
                    self.updates.check()
            yield DeviceModel(back.device, state, back.samples)

    def _state(self, back: TrainedPart) -> dict[str, torch.Tensor]:
        """Return one model; an error in reading it excludes its device, and no other."""
        try:
            return self.read(back)
        except PiparError:
            raise
        except Exception as error:
            if is_lack_of_memory(error):
                raise  # of this machine: no device is to blame
            raise UnusableModelError(back.device, f"{back.device} returned no valid model: {describe(error)}") from None
