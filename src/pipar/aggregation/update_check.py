"""Models that devices return are compared: one that is far from the global model and from all others is refused.

An average gives each device its share, however far its model is from the others. A robust aggregator limits what small
changes do; this check keeps out numbers with which no other device could train any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from pipar.errors import UnusableModelError

State = Mapping[str, Tensor]

#: Weights below this mean size, such as those that start at 0, count as this large when a change is compared with them.
_SMALL_WEIGHT = 0.2
#: The largest change of all weights in a round, relative to them. That of a training that learns is below 2.
_LARGEST_CHANGE = 100.0
#: While there is no other device to compare with. In float32, another device can still train with such weights.
_LARGEST_ALONE = 1e9
#: A larger change may be as large as this many times the median of the others' changes: all may diverge together, or
#: their targets are far from 0. A device with more samples takes more steps, so its change may be larger by as much.
_UNUSUAL_FACTOR = 100.0
#: How far above those of other devices the statistics of batch normalisation, and other buffers, may be.
_LARGEST_BUFFER = 1e3
_LARGEST_VARIANCE = 1e6
#: The batch counter of torch's normalisation layers, in which the largest value counts.
_BATCHES, _MOST_BATCHES = "num_batches_tracked", 10**9
_AVERAGES = ("running_mean", "running_var")
#: Values that are compared at a time.
_BLOCK = 1 << 20
#: Devices whose last models are remembered, for rounds of one device.
_REMEMBERED = 16


@dataclass(frozen=True)
class _Update:
    """What a device's model differs by from the global one."""

    samples: int  # that it trained on in the round
    change: float  # the norm over all trained weights
    size: float  # the norm of the global weights
    buffers: dict[str, float]  # the largest magnitude in each floating-point buffer, or in the batches that it averages
    integers: frozenset[str]  # entries of integers that differ, without batch counters


class UpdateCheck:
    """Compares the models of a round with each other; if there is only one, with the last ones of other devices."""

    def __init__(self) -> None:
        self._counted: dict[str, _Update] = {}  # by device, the last one that counted
        self._new: dict[str, _Update] = {}  # of this round

    def begin(self) -> None:
        """Begin a round; of one that was begun before and did not end, nothing is kept."""
        self._new = {}

    def add(
        self,
        device: str,
        state: State,
        before: State,
        parameters: AbstractSet[str],
        samples: int,
        momenta: Mapping[str, float | None] | None = None,
    ) -> None:
        """Add the model of a device; raise UnusableModelError if it cannot be right, whatever the others are.

        `momenta` has the momentum of each layer with batch statistics, by the name of its batch counter.
        """
        for name, tensor in state.items():
            if name.endswith(_BATCHES) and not _counts_up(before[name], tensor):
                raise UnusableModelError(
                    device, f"{device} returned a model whose {name} did not count up, as it does in training."
                )
        self._new[device] = _Update(
            samples,
            _distance((state[name], before[name]) for name in parameters if name in state),
            max(_size(before, parameters), _SMALL_WEIGHT * math.sqrt(_count(before, parameters))),
            {
                name: float(_of_batches(name, state, before, momenta or {}).abs().max())
                for name, tensor in state.items()
                if _is_buffer(name, tensor, parameters)
            },
            frozenset(name for name, tensor in state.items() if _is_changed(name, tensor, before)),
        )

    def check(self) -> None:
        """Raise UnusableModelError for the device of this round whose model is the farthest from the others, if any."""
        excess = {device: self._excess(device, own) for device, own in self._new.items()}
        for device in sorted(excess, key=lambda name: -excess[name]):
            own = self._new[device]
            if not excess[device] <= 1:
                raise UnusableModelError(
                    device,
                    f"The model that {device} returned differs by {own.change:.3g} from the global model, and at most "
                    f"{self._largest_change(device, own):.3g} is allowed: those of other devices differ far less. "
                    "Unless the device is faulty, its training has diverged, for which a smaller "
                    "optimizer.learning_rate may help, or its data are scaled in another way.",
                )
            self._check_buffers(device, own)

    def _excess(self, device: str, own: _Update) -> float:
        # Without trained weights, as in a frozen part with batch normalisation, both are 0.
        return own.change / self._largest_change(device, own) if own.change else 0.0

    def _largest_change(self, device: str, own: _Update) -> float:
        others = self._others(device)
        if not others:
            return _LARGEST_ALONE * own.size
        usual = median(other.change * max(1.0, own.samples / other.samples) for other in others)
        return max(_LARGEST_CHANGE * own.size, _UNUSUAL_FACTOR * usual)

    def _check_buffers(self, device: str, own: _Update) -> None:
        others = self._others(device)
        if not others:
            return
        for name in sorted(own.integers.difference(*(other.integers for other in others))):
            raise UnusableModelError(device, f"{device} returned a model with another {name}; no other device did.")
        for name, largest in own.buffers.items():
            factor = _LARGEST_VARIANCE if name.endswith("running_var") else _LARGEST_BUFFER
            most = factor * max(1.0, median(other.buffers.get(name, 0.0) for other in others))
            if largest > most:
                raise UnusableModelError(
                    device,
                    f"The model that {device} returned has values of {largest:.3g} in {name}, and at most {most:.3g} "
                    "is allowed: those of other devices are far smaller. Its data may be scaled in another way.",
                )

    def _others(self, device: str) -> Sequence[_Update]:
        now = [update for name, update in self._new.items() if name != device]
        return now or [update for name, update in self._counted.items() if name != device]

    def end(self) -> None:
        """The models of this round count."""
        for device, update in self._new.items():
            self._counted.pop(device, None)
            self._counted[device] = update
        for device in list(self._counted)[:-_REMEMBERED]:
            del self._counted[device]
        self._new = {}


def batch_momenta(module: nn.Module) -> dict[str, float | None]:
    """Return the momentum of each layer that averages batch statistics, by the name of its batch counter."""
    momenta: dict[str, float | None] = {}
    for place, layer in module.named_modules():
        counter, momentum = getattr(layer, _BATCHES, None), getattr(layer, "momentum", None)
        if isinstance(counter, Tensor) and counter.numel() == 1 and isinstance(momentum, float | int | None):
            momenta[f"{place}.{_BATCHES}".removeprefix(".")] = momentum
    return momenta


def _counts_up(before: Tensor, after: Tensor) -> bool:
    grown = after.double() - before.double()
    return bool(((grown >= 0) & (grown <= _MOST_BATCHES)).all())


def _of_batches(name: str, state: State, before: State, momenta: Mapping[str, float | None]) -> Tensor:
    """Return a buffer; of running averages r' that were r, what the batches had on average, r + (r' - r) / share.

    Averages of other devices follow the global ones, which one device could raise by a little in every round.
    """
    counter = f"{name.rpartition('.')[0]}.{_BATCHES}".removeprefix(".")
    batches = int(state[counter] - before[counter]) if counter in momenta and counter in state else 0
    if not batches or not name.endswith(_AVERAGES):
        return state[name]
    momentum = momenta[counter]
    share = batches / int(state[counter]) if momentum is None else 1 - (1 - momentum) ** batches
    change = state[name].double() - before[name].double()
    return before[name] + change / share if share else state[name]


def _is_buffer(name: str, tensor: Tensor, parameters: AbstractSet[str]) -> bool:
    return name not in parameters and tensor.is_floating_point() and tensor.numel() > 0


def _is_changed(name: str, tensor: Tensor, before: State) -> bool:
    is_integer = not tensor.is_floating_point() and not name.endswith(_BATCHES)
    return is_integer and not torch.equal(tensor, before[name])


def _size(state: State, names: AbstractSet[str]) -> float:
    return math.hypot(*(torch.linalg.vector_norm(state[name]).item() for name in names if name in state))


def _count(state: State, names: AbstractSet[str]) -> int:
    return sum(state[name].numel() for name in names if name in state)


def _distance(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the norm of all differences; block by block, because a copy of a whole tensor may not fit in memory."""
    norms = []
    for one, other in pairs:
        mine, theirs = one.reshape(-1), other.reshape(-1)
        places = (slice(start, start + _BLOCK) for start in range(0, len(mine), _BLOCK))
        norms += [torch.linalg.vector_norm(mine[place] - theirs[place]).item() for place in places]
    return math.hypot(*norms)
