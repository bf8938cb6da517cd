"""Measuring a network on this machine, layer by layer; paper III-C, phase 1.

Times are CPU times of one thread: another program on the machine makes the measurement longer, not the numbers
larger.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipar.nn.aggregate import federated_average
from pipar.nn.models import uses_batch_statistics
from pipar.nn.runtime import keep_freed_memory, one_thread
from pipar.nn.steps import Optimizer, Part
from pipar.nn.tensors import read_state, read_tensor, state_body, tensor_body
from pipar.planner.cache import machine_fingerprint
from pipar.planner.profile import LayerProfile, Profile
from pipar.protocol.messages import Kind, Message

#: Shares of the batch that are measured: the full batch, and micro-batches down to where fixed costs show. Half
#: the batch is among them because large activations do not fit caches: a line from B/4 to B is 10 % off there.
SHARES = (1, 2, 4, 16, 32)
#: The median of more passes than this hardly moves.
MOST_REPETITIONS = 40
FEWEST_REPETITIONS = 3
#: Stages come one by one, with other work between them: caches are cold when one starts. Without a pause, passes were
#: 10 to 20 % quicker than they are in training.
_PAUSE_S = 0.01
_CUT_REPETITIONS = 7

Progress = Callable[[float], None]


def measure_profile(
    model: nn.Sequential,
    *,
    model_name: str,
    input_shape: Sequence[int],
    classes: int,
    batch_size: int,
    dtype: torch.dtype = torch.float32,
    load: Callable[[int], object] | None = None,
    progress: Progress | None = None,
    budget_s: float = 4.0,
) -> Profile:
    """Return the times and sizes of every layer and of the work around training, from about `budget_s` seconds.

    One pass is a training pass of the whole network in train mode on one thread; the last layer includes the
    loss. Each time is the median of several passes: three at least, unless a pass alone uses up the budget.
    `load(n)` loads n samples; it is called from another thread, `progress` is not. The model keeps its weights,
    gradients and running statistics: a copy is measured.
    """
    shares: SimpleQueue[float | None] = SimpleQueue()
    task = _Task(model, tuple(input_shape), classes, batch_size, dtype, load, shares.put, budget_s)
    # In a thread of its own, because stages run in one: memory is given back to the system more often in the
    # main thread, and a full batch of VGG-5 took 12 to 15 % longer there.
    with ThreadPoolExecutor(1, thread_name_prefix="measure") as thread:
        measured = thread.submit(_measure, task)
        measured.add_done_callback(lambda _: shares.put(None))
        for share in iter(shares.get, None):
            if progress is not None:
                progress(share)
    sizes, layers, passes, overheads = measured.result()
    return Profile(
        model=model_name,
        dtype=str(dtype).removeprefix("torch."),
        batch_sizes=sizes,
        layers=layers,
        machine=machine_fingerprint(),
        how=f"median CPU time of {passes} training passes on one thread",
        **overheads,
    )


@dataclass(frozen=True)
class _Task:
    """What `measure_profile` was asked for."""

    model: nn.Sequential
    input_shape: tuple[int, ...]
    classes: int
    batch_size: int
    dtype: torch.dtype
    load: Callable[[int], object] | None
    progress: Progress
    budget_s: float


def _measure(task: _Task) -> tuple[tuple[int, ...], tuple[LayerProfile, ...], int, dict[str, float]]:
    """Return the measured batch sizes, the layers, the number of full passes, and the overheads."""
    # Only the CPU's generator: dropout draws from it, and the run's own numbers must not depend on profiling.
    keep_freed_memory()  # as the processes of a run do
    with one_thread(), torch.random.fork_rng(devices=[]):
        model = copy.deepcopy(task.model).to(task.dtype).train()
        sizes = batch_sizes(task.batch_size, batch_statistics=uses_batch_statistics(model))
        batches = [_Batch.random(size, task.input_shape, task.classes, task.dtype) for size in sizes]
        passes = _measure_passes(model, batches, _Budget(0.8 * task.budget_s), task.progress)
        layers = _layer_profiles(model, batches[0], passes)
        overheads = _measure_overheads(model, layers[0].output_bytes, task)
    task.progress(1.0)
    return sizes, layers, len(passes[-1]), overheads


def batch_sizes(batch_size: int, *, batch_statistics: bool) -> tuple[int, ...]:
    """Return B, B/2, B/4, B/16 and B/32, ascending and distinct; with batch normalisation none is below 2."""
    least = 2 if batch_statistics else 1
    return tuple(sorted({max(least, round(batch_size / share)) for share in SHARES}))


class _Budget:
    """Seconds that may pass, from now on, and whether another repetition is due."""

    def __init__(self, seconds: float) -> None:
        self._start, self._seconds = time.perf_counter(), seconds

    def spent(self) -> float:
        """Return the share of the budget that is gone; above 1 if there is none left."""
        return (time.perf_counter() - self._start) / self._seconds if self._seconds > 0 else float("inf")

    def wants_another(self, done: int) -> bool:
        # A median of three is worth going over the budget, up to twice; a huge network has to do with one pass.
        allowed = 2.0 if done < FEWEST_REPETITIONS else 1.0
        return done == 0 or (done < MOST_REPETITIONS and self.spent() < allowed)


# --- layers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Batch:
    inputs: Tensor
    targets: Tensor

    @classmethod
    def random(cls, size: int, input_shape: Sequence[int], classes: int, dtype: torch.dtype) -> _Batch:
        generator = torch.Generator().manual_seed(size)
        inputs = torch.randn(size, *input_shape, generator=generator, dtype=dtype)
        return cls(inputs, torch.randint(classes, (size,), generator=generator))


@dataclass(frozen=True)
class _Pass:
    """Seconds of each layer in one training pass."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


def _measure_passes(
    model: nn.Sequential, batches: Sequence[_Batch], budget: _Budget, progress: Progress
) -> list[list[_Pass]]:
    """Return the passes of each batch size.

    The sizes take turns, so that a machine that gets slower for a while does so for all of them. The first round
    warms up, kernels are chosen and memory is fetched in it; it counts only for a network so large that it alone
    used up the budget twice.
    """
    warm_up: list[list[_Pass]] = [[] for _ in batches]
    _one_round(model, batches, warm_up)
    if budget.spent() >= 2.0:
        return warm_up
    passes: list[list[_Pass]] = [[] for _ in batches]
    while budget.wants_another(len(passes[-1])):
        _one_round(model, batches, passes)
        progress(min(0.9, 0.9 * budget.spent()))
    return passes


def _one_round(model: nn.Sequential, batches: Sequence[_Batch], passes: list[list[_Pass]]) -> None:
    largest = len(batches[-1].targets)
    for batch, done in zip(batches, passes, strict=True):
        # A full batch is the first of its iteration and makes new gradients; a micro-batch mostly adds to them.
        if len(batch.targets) == largest:
            model.zero_grad(set_to_none=True)
        # Small ones cost little and scatter most: twice and four times at B/16 and B/32.
        for _ in range(max(1, min(4, largest // (8 * len(batch.targets))))):
            time.sleep(_PAUSE_S)
            done.append(_training_pass(model, batch))


def _training_pass(model: nn.Sequential, batch: _Batch) -> _Pass:
    """Return the CPU seconds of each layer, forward and backward.

    The graph stays in one piece, as it does within a device's or a server's part, and a hook at each cut notes
    when the gradient gets there: a backward call for each layer would cost 8 % more on small micro-batches. The
    input needs no gradient, as on a device.
    """
    output, forward_s = batch.inputs, []
    reached: dict[int, float] = {}
    for place, layer in enumerate(model, start=1):
        start = time.thread_time()
        output = layer(output)
        if place == len(model):
            output = functional.cross_entropy(output, batch.targets, reduction="sum") / len(batch.targets)
        forward_s.append(time.thread_time() - start)
        if place < len(model) and output.requires_grad:
            output.register_hook(partial(_note, reached, place))  # type: ignore[no-untyped-call]
    reached[len(model)] = time.thread_time()
    if output.requires_grad:
        torch.autograd.backward(output)
    return _Pass(tuple(forward_s), _backward_times(reached, time.thread_time(), len(model)))


def _note(reached: dict[int, float], place: int, _: Tensor) -> None:
    reached[place] = time.thread_time()


def _backward_times(reached: Mapping[int, float], end: float, layers: int) -> tuple[float, ...]:
    """Return each layer's time from the gradient of its output to that of its input; 0 if it gets no gradient."""
    return tuple(
        max(0.0, reached.get(place - 1, end) - reached[place]) if place in reached else 0.0
        for place in range(1, layers + 1)
    )


def _layer_profiles(
    model: nn.Sequential, smallest: _Batch, passes: Sequence[Sequence[_Pass]]
) -> tuple[LayerProfile, ...]:
    sizes = _output_bytes(model, smallest)
    return tuple(
        LayerProfile(
            name=name,
            forward_s=tuple(median(one.forward_s[place] for one in done) for done in passes),
            backward_s=tuple(median(one.backward_s[place] for one in done) for done in passes),
            least_s=tuple(min(one.forward_s[place] + one.backward_s[place] for one in done) for done in passes),
            output_bytes=sizes[place],
            parameter_bytes=_state_bytes(layer),
        )
        for place, (name, layer) in enumerate(model._modules.items())
        if layer is not None
    )


def _output_bytes(model: nn.Sequential, batch: _Batch) -> list[int]:
    sizes, output = [], batch.inputs
    with torch.no_grad():
        for layer in model:
            output = layer(output)
            sizes.append(output.numel() * output.element_size() // len(batch.targets))
    return sizes


def _state_bytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in [*module.parameters(), *module.buffers()])


# --- the work around the layers -------------------------------------------------------------------------------


def _measure_overheads(model: nn.Sequential, cut_bytes: int, task: _Task) -> dict[str, float]:
    """Return the profile's fields for loading, coding, stepping, packing, installing and aggregating.

    The functions are those that training calls. All but loading run on something small and something large, for
    the cost of a call and the cost of a byte: one sample and a quarter of a batch at a cut that gives `cut_bytes` a
    sample; the first layer and the whole network.
    """
    budget_s = 0.2 * task.budget_s / 13
    fields = {"load_s": 0.0}
    if task.load is not None:
        fields["load_s"] = _median_s(partial(task.load, task.batch_size), budget_s) / task.batch_size
    fields["backward_at_cut_s"] = _backward_at_cut_s(model, task)
    coding = [_coding(cut_bytes, samples, task) for samples in (1, max(2, task.batch_size // 4))]
    models = [_exchange(part) for part in (nn.Sequential(next(iter(model))), model)]
    for small, large in (coding, models):
        for kind in small.work:
            times = (_median_s(small.work[kind], budget_s), _median_s(large.work[kind], budget_s))
            fields[f"{kind}_s"], fields[f"{kind}_s_per_byte"] = _line((small.size_bytes, large.size_bytes), times)
    return fields


def _backward_at_cut_s(model: nn.Sequential, task: _Task) -> float:
    """Return what it costs to start a backward behind the first layer instead of arriving there in one piece.

    Both on a micro-batch so small that the layer itself hardly counts, and each by its quickest of several: a
    difference of two medians was mostly noise.
    """
    first = nn.Sequential(next(iter(model)))
    batch = _Batch.random(2, task.input_shape, task.classes, task.dtype)
    if len(model) == 1 or not first(batch.inputs).requires_grad:
        return 0.0
    gradient = torch.ones_like(first(batch.inputs))
    in_one_piece, alone = [], []
    for _ in range(_CUT_REPETITIONS):
        in_one_piece.append(_training_pass(model, batch).backward_s[0])
        output = first(batch.inputs)
        time.sleep(_PAUSE_S)
        start = time.thread_time()
        torch.autograd.backward(output, gradient)
        alone.append(time.thread_time() - start)
    return max(0.0, min(alone) - min(in_one_piece))


@dataclass(frozen=True)
class _Sized:
    """Some kinds of work on something of one size."""

    size_bytes: int
    work: Mapping[str, Callable[[], object]]


def _coding(cut_bytes: int, samples: int, task: _Task) -> _Sized:
    activation = torch.ones((samples, max(1, cut_bytes // task.dtype.itemsize)), dtype=task.dtype)
    labels = torch.zeros(samples, dtype=torch.int64)
    message = Message(Kind.GRADIENT, samples=samples, batch_samples=samples, body=tensor_body(activation))
    encode, decode = partial(tensor_body, activation, labels), partial(read_tensor, message)
    return _Sized(activation.nbytes, {"encode": encode, "decode": decode})


def _exchange(module: nn.Sequential) -> _Sized:
    """Return the optimiser's step and the exchange of this part of a network; its weights stay where they are."""
    part = Part(module, Optimizer(learning_rate=0.0))
    packed = state_body(part.state())
    states = [(part.state(), 1)]
    work: dict[str, Callable[[], object]] = {
        "step": partial(_step, part),
        "pack": lambda: state_body(part.state()),
        "install": lambda: part.install(read_state(packed), keep_momentum=False),
        "aggregate": lambda: federated_average(states),
    }
    return _Sized(max(1, _state_bytes(module)), work)


def _step(part: Part) -> None:
    for parameter in part.module.parameters():
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    part.step()


def _line(sizes: tuple[int, int], times: tuple[float, float]) -> tuple[float, float]:
    """Return the fixed cost and the cost of a byte of a line through two measurements; neither is below zero."""
    if sizes[1] <= sizes[0]:
        return 0.0, times[1] / sizes[1]
    per_byte = max(0.0, (times[1] - times[0]) / (sizes[1] - sizes[0]))
    return max(0.0, times[0] - per_byte * sizes[0]), per_byte


def _median_s(work: Callable[[], object], budget_s: float) -> float:
    """Return the median CPU time of the work, each time from rest."""
    work()
    budget = _Budget(budget_s)
    times: list[float] = []
    while budget.wants_another(len(times)):
        time.sleep(_PAUSE_S)
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return median(times)
