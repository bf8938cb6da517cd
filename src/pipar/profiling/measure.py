"""Measuring a network on this machine, layer by layer; paper III-C, phase 1.

Times are CPU times of one thread: another program on the machine makes the measurement longer, not the numbers
larger. A machine too small for the whole network measures as many of its first layers as it can hold.
"""

from __future__ import annotations

import copy
import gc
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipar import random_streams
from pipar.errors import ConfigError, PlanError
from pipar.methods import Plan
from pipar.nn.learner import LearnerSettings, TorchLearner
from pipar.nn.models import uses_batch_statistics
from pipar.nn.parts import Optimizer, TorchDevicePart
from pipar.nn.rectified import rectified_cuts
from pipar.nn.runtime import keep_freed_memory, one_thread, release_freed_memory, release_model_memory
from pipar.nn.split import split_model
from pipar.nn.tensors import read_tensor, tensor_body
from pipar.privacy.mechanisms import clip_and_noise
from pipar.profiling.cache import machine_fingerprint, usable_cores
from pipar.profiling.coding_costs import changes_in_a_round, coding_times, line, run_through
from pipar.profiling.contention import measure_contention
from pipar.profiling.memory import largest_prefix, training_bytes
from pipar.profiling.operation_counter import count_layers
from pipar.profiling.profile import CodingTimes, LayerProfile, Profile, batch_sizes
from pipar.units import format_bytes
from pipar.wire.messages import Body, Kind, Message
from pipar.wire.orders import TrainedPart

#: The median of more passes than this hardly moves.
MOST_REPETITIONS = 40
FEWEST_REPETITIONS = 3
#: Stages come one by one, from rest: caches are cold and the clock is low when one starts. Without a pause, passes were
#: 10 to 20 % quicker than they are in training; with one of 10 ms, still 5 to 15 %.
_PAUSE_S = 0.08
_MOST_OTHERS = 15
_CUT_REPETITIONS = 7
_LIGHT_BYTES = 8 << 20
_NOISED_BYTES = 1 << 20
#: Aggregating two models takes as much memory as five. Of a larger network its light layers are aggregated.
_AGGREGATED_BYTES = 200 << 20
_AGGREGATED_COPIES = 5

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
    memory_bytes: int | None = None,
    rectified: Collection[int] | None = None,
) -> Profile:
    """Return the times and sizes of every layer and of the work around training, from about `budget_s` seconds.

    One pass is a training pass of the whole network in train mode on one thread; the last layer includes the
    loss. Each time is the median of several passes: three at least, unless a pass alone uses up the budget.
    `load(n)` loads n samples; it is called from another thread, `progress` is not. The model keeps its weights,
    gradients and running statistics: a copy is measured.

    If the network does not fit into `memory_bytes`, or into what the system gives this process, the profile is of the
    most first layers that do; batches too large for them are not run, and have times in proportion to the largest
    that was. `rectified` are the split points behind a ReLU, for who knows them: to find out takes more forwards.
    """
    shares: SimpleQueue[float | None] = SimpleQueue()
    is_wanted = True

    def tell(share: float) -> None:
        if not is_wanted:
            raise InterruptedError  # who asked is gone, as by Ctrl-C
        shares.put(share)

    task = _Task(
        model, model_name, tuple(input_shape), classes, batch_size, dtype, load, tell, budget_s, memory_bytes, rectified
    )
    keep_freed_memory()  # as the processes of a run do
    # In a thread of its own, because stages run in one: memory is given back to the system more often in the
    # main thread, and a full batch of VGG-5 took 12 to 15 % longer there.
    with ThreadPoolExecutor(1, thread_name_prefix="measure") as thread:
        measured = thread.submit(_measure, task)
        measured.add_done_callback(lambda _: shares.put(None))
        try:
            for share in iter(shares.get, None):
                if progress is not None:
                    progress(share)
        except BaseException:
            is_wanted = False
            raise
    release_model_memory(_state_bytes(model))  # a server or a device goes on in this process
    return measured.result()


@dataclass(frozen=True)
class _Task:
    """What `measure_profile` was asked for."""

    model: nn.Sequential
    model_name: str
    input_shape: tuple[int, ...]
    classes: int
    batch_size: int
    dtype: torch.dtype
    load: Callable[[int], object] | None
    progress: Progress
    budget_s: float
    memory_bytes: int | None
    rectified: Collection[int] | None


def _measure(task: _Task) -> Profile:
    # Only the CPU's generator: dropout draws from it, and the run's own numbers must not depend on profiling.
    with one_thread(), torch.random.fork_rng(devices=[]):
        sizes = _sizes_only(task)
        attempt = _first_attempt(sizes, task)
        measured = _measured(attempt, sizes, task)
        while measured is None:
            gc.collect()  # what the failed attempt allocated may hang in cycles
            release_freed_memory()
            attempt = attempt.smaller(len(task.model), task)
            measured = _measured(attempt, sizes, task)
    task.progress(1.0)
    return measured


# --- what fits ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attempt:
    """So many layers, measured in batches of these sizes."""

    layers: int
    batch_sizes: tuple[int, ...]

    def smaller(self, all_layers: int, task: _Task) -> _Attempt:
        """Return the next attempt after one that the system refused memory for.

        The whole network needs the whole batch: without it, it is cut. What is cut can do with small micro-batches.
        """
        if self.layers < all_layers and len(self.batch_sizes) > 1:
            return replace(self, batch_sizes=self.batch_sizes[:-1])
        if self.layers == 1:
            raise _too_little(task, "what the system gives this process")
        return replace(self, layers=self.layers - 1)


def _sizes_only(task: _Task) -> Profile:
    """Return the profile of the whole network without its times, from a few samples."""
    dtype = str(task.dtype).removeprefix("torch.")
    sizes = batch_sizes(task.batch_size, batch_statistics=uses_batch_statistics(task.model))
    return Profile(
        model=task.model_name,
        dtype=dtype,
        batch_sizes=sizes,
        layers=tuple(
            LayerProfile(
                name=count.name,
                forward_s=(0.0,) * len(sizes),
                backward_s=(0.0,) * len(sizes),
                output_bytes=count.output_bytes(dtype),
                parameter_bytes=count.parameter_bytes(dtype),
                saved_bytes=count.saved_bytes(dtype),
                working_bytes=count.working_bytes(dtype),
            )
            for count in count_layers(task.model, task.input_shape, run=True)
        ),
        machine=machine_fingerprint(),
    )


def _first_attempt(sizes: Profile, task: _Task) -> _Attempt:
    """Return the most layers, and of the batch sizes those, that fit into the memory that was given."""
    if task.memory_bytes is None:
        return _Attempt(len(sizes.layers), sizes.batch_sizes)
    statistics = uses_batch_statistics(task.model)
    layers = largest_prefix(sizes, task.batch_size, task.memory_bytes, batch_statistics=statistics)
    if layers == 0:
        raise _too_little(task, format_bytes(task.memory_bytes))
    fitting = [size for size in sizes.batch_sizes if _pass_bytes(sizes, layers, size) <= task.memory_bytes]
    return _Attempt(layers, tuple(fitting) or sizes.batch_sizes[:1])


def _pass_bytes(sizes: Profile, layers: int, samples: int) -> int:
    return training_bytes(sizes, Plan(layers, 1), samples)


def _too_little(task: _Task, memory: str) -> ConfigError:
    return ConfigError(
        f"Not even the first layer of {task.model_name} fits into {memory}: give more memory or a smaller "
        "run.batch_size."
    )


def _measured(attempt: _Attempt, sizes: Profile, task: _Task) -> Profile | None:
    """Return the profile of these layers; None if the system had no memory for them."""
    try:
        return _measure_layers(attempt, sizes, task)
    except (RuntimeError, MemoryError) as error:
        if not _is_about_memory(error):
            raise
    return None


def _is_about_memory(error: Exception) -> bool:
    """Return True for torch's own words, those of its kernels, and C++'s."""
    words = ("memory", "bad_alloc", "could not create a primitive")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _measure_layers(attempt: _Attempt, sizes: Profile, task: _Task) -> Profile:
    whole = attempt.layers == len(task.model)
    model = _first_layers(task.model, attempt.layers).to(task.dtype).train()
    batches = [_Batch.random(size, task.input_shape, task.classes, task.dtype) for size in attempt.batch_sizes]
    passes = _measure_passes(model, batches, _Budget(0.8 * task.budget_s), task.progress, with_loss=whole)
    measured = _layer_profiles(sizes, passes, attempt.batch_sizes)
    layers, coding, (changes_share, changes) = _with_coding(measured, model, attempt, task)
    overheads = _measure_overheads(model, layers[0].output_bytes, task, with_loss=whole)
    coding = {name: _with_message(times, overheads) for name, times in coding.items()}
    coding["changes"] = changes
    crowded = _crowded(model, batches, sizes, task, with_loss=whole) if whole else ()
    return replace(
        sizes,
        layers=layers,
        crowded=crowded,
        crowd=_others() if crowded else 0,
        total_layers=0 if whole else len(task.model),
        coding=coding,
        changes_share=changes_share,
        how=_how(attempt, sizes, len(passes[-1])),
        **overheads,  # type: ignore[arg-type]
    )


def _others() -> int:
    """Return how many other cores compute while crowding is measured: all, or enough to fill caches and memory."""
    return min(usable_cores() - 1, _MOST_OTHERS)


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def _crowded(
    model: nn.Sequential, batches: Sequence[_Batch], sizes: Profile, task: _Task, *, with_loss: bool
) -> tuple[float, ...]:
    """Return what other cores cost a pass; nothing where there are none, or no memory for copies of the network."""
    others = _others()
    # A copy of the network for each, with a batch's activations; a device with little memory is no server.
    needed = others * training_bytes(sizes, Plan(len(sizes.layers), 1), task.batch_size)
    if others < 1 or task.memory_bytes is not None or needed > _free_bytes() / 2:
        return ()

    def run(network: nn.Sequential, number: int) -> object:
        return _training_pass(network, batches[number], with_loss=with_loss)

    return measure_contention(model, len(batches), run, others=others, budget_s=0.5 * task.budget_s)


def _how(attempt: _Attempt, sizes: Profile, passes: int) -> str:
    how = f"median CPU time of {passes} training pass{'es' if passes > 1 else ''} on one thread"
    largest = attempt.batch_sizes[-1]
    return how if largest == sizes.batch_sizes[-1] else f"{how}, above a batch of {largest} in proportion to it"


def _first_layers(model: nn.Sequential, layers: int) -> nn.Sequential:
    """Return a copy of the first layers, which keep their names; of the others there is no copy to hold."""
    named = [(name, layer) for name, layer in model._modules.items() if layer is not None]
    return copy.deepcopy(nn.Sequential(OrderedDict(named[:layers])))


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
    model: nn.Sequential, batches: Sequence[_Batch], budget: _Budget, progress: Progress, *, with_loss: bool
) -> list[list[_Pass]]:
    """Return the passes of each batch size.

    The sizes take turns, so that a machine that gets slower for a while does so for all of them. The first round
    warms up, kernels are chosen and memory is fetched in it; it counts only for a network so large that it alone
    used up the budget twice.
    """
    warm_up: list[list[_Pass]] = [[] for _ in batches]
    _one_round(model, batches, warm_up, with_loss=with_loss)
    if budget.spent() >= 2.0:
        return warm_up
    passes: list[list[_Pass]] = [[] for _ in batches]
    while budget.wants_another(len(passes[-1])):
        _one_round(model, batches, passes, with_loss=with_loss)
        progress(min(0.9, 0.9 * budget.spent()))
    return passes


def _one_round(model: nn.Sequential, batches: Sequence[_Batch], passes: list[list[_Pass]], *, with_loss: bool) -> None:
    largest = len(batches[-1].targets)
    for batch, done in zip(batches, passes, strict=True):
        # A full batch is the first of its iteration and makes new gradients; a micro-batch mostly adds to them.
        if len(batch.targets) == largest:
            model.zero_grad(set_to_none=True)
        # Small ones cost little and scatter most: twice and four times at B/16 and B/32.
        for _ in range(max(1, min(4, largest // (8 * len(batch.targets))))):
            time.sleep(_PAUSE_S)
            done.append(_training_pass(model, batch, with_loss=with_loss))


def _training_pass(model: nn.Sequential, batch: _Batch, *, with_loss: bool = True) -> _Pass:
    """Return the CPU seconds of each layer, forward and backward; the first layers of a network have no loss.

    The graph stays in one piece, as it does within a device's or a server's part, and a hook at each cut notes
    when the gradient gets there: a backward call for each layer would cost 8 % more on small micro-batches. The
    input needs no gradient, as on a device.
    """
    output, forward_s = batch.inputs, []
    reached: dict[int, float] = {}
    for place, layer in enumerate(model, start=1):
        start = time.thread_time()
        output = layer(output)
        if with_loss and place == len(model):
            output = functional.cross_entropy(output, batch.targets, reduction="sum") / len(batch.targets)
        forward_s.append(time.thread_time() - start)
        if place < len(model) and output.requires_grad:
            output.register_hook(partial(_note, reached, place))  # type: ignore[no-untyped-call]
    gradient = None if with_loss else torch.ones_like(output)
    reached[len(model)] = time.thread_time()
    if output.requires_grad:
        torch.autograd.backward(output, gradient)
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
    sizes: Profile, passes: Sequence[Sequence[_Pass]], measured: tuple[int, ...]
) -> tuple[LayerProfile, ...]:
    """Return the measured layers with their times, and for batches that were too large those in proportion."""
    shares = [size / measured[-1] for size in sizes.batch_sizes[len(measured) :]]

    def times(take: Callable[[_Pass], float], of: Callable[[list[float]], float]) -> tuple[float, ...]:
        found = [of([take(one) for one in done]) for done in passes]
        return (*found, *(found[-1] * share for share in shares))

    def layer(place: int) -> LayerProfile:
        return replace(
            sizes.layers[place],
            forward_s=times(lambda one: one.forward_s[place], median),
            backward_s=times(lambda one: one.backward_s[place], median),
            least_s=times(lambda one: one.forward_s[place] + one.backward_s[place], min),
        )

    return tuple(layer(place) for place in range(len(passes[0][0].forward_s)))


def _state_bytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in [*module.parameters(), *module.buffers()])


# --- what crosses the cuts ------------------------------------------------------------------------------------


def _with_coding(
    layers: tuple[LayerProfile, ...], model: nn.Sequential, attempt: _Attempt, task: _Task
) -> tuple[tuple[LayerProfile, ...], dict[str, CodingTimes], tuple[float, CodingTimes]]:
    """Return the layers with what encodings leave at the cut behind each, the encodings' times, and those of changes.

    From one pass over a quarter of a batch, as much as the memory was enough for. The times are those at the first cut
    behind a ReLU, where all encodings are possible, or else at the first cut.
    """
    samples = min(attempt.batch_sizes[-1], max(attempt.batch_sizes[0], task.batch_size // 4))
    batch = _samples(samples, task)
    crossings = run_through(model, batch.inputs, batch.targets, with_loss=attempt.layers == len(task.model))
    changes = changes_in_a_round(model)
    model.zero_grad(set_to_none=True)
    rectified = task.rectified if task.rectified is not None else rectified_cuts(task.model, task.input_shape)
    found = list(layers)
    for place, crossing in enumerate(crossings, start=1):
        found[place - 1] = replace(found[place - 1], shares=crossing.shares(rectified=place in rectified))
    known = [replace(layer, rectified=place in rectified) for place, layer in enumerate(found, start=1)]
    cut = min((place for place in rectified if place <= len(crossings)), default=1)
    return tuple(known), coding_times(crossings[cut - 1], _PAUSE_S) if crossings else {}, changes


def _with_message(times: CodingTimes, overheads: Mapping[str, float]) -> CodingTimes:
    """Return an encoding's times with what it costs in any to begin a message, mostly with its first chunk.

    What it costs to read one is counted once for a tensor, whatever its encoding.
    """
    return replace(times, encode_s=max(times.encode_s, overheads["encode_s"]))


def _samples(count: int, task: _Task) -> _Batch:
    """Return some of the samples that are loaded, or made-up ones."""
    loaded = task.load(task.batch_size) if task.load is not None else None
    match loaded:
        case (Tensor() as inputs, Tensor() as targets) if tuple(inputs.shape[1:]) == task.input_shape:
            return _Batch(inputs[:count].to(task.dtype), targets[:count])
        case _:
            return _Batch.random(count, task.input_shape, task.classes, task.dtype)


# --- the work around the layers -------------------------------------------------------------------------------


def _measure_overheads(model: nn.Sequential, cut_bytes: int, task: _Task, *, with_loss: bool) -> dict[str, float]:
    """Return the profile's fields for loading, coding, stepping, packing, installing, aggregating and noise.

    The functions are those that training calls. All but loading and noise run on something small and something large,
    for the cost of a call and the cost of a byte: one sample and a quarter of a batch at a cut that gives `cut_bytes` a
    sample; the first layer and the whole network; the models of one device and of two.
    """
    budget_s = 0.2 * task.budget_s / 14
    fields = {"load_s": 0.0}
    if task.load is not None:
        load = partial(task.load, task.batch_size)
        fields["load_s"] = _median_s(lambda: load, budget_s) / task.batch_size
    fields["noise_s_per_byte"] = _noise_s_per_byte(_light_layers(model), budget_s)
    fields["backward_at_cut_s"] = _backward_at_cut_s(model, task, with_loss=with_loss)
    coding = [_coding(cut_bytes, samples, task) for samples in (1, max(2, task.batch_size // 4))]
    fields |= _lines(coding, budget_s) | _lines(_aggregations(model, task, with_loss=with_loss), budget_s)
    # A machine that is short of memory for training has none for whole models twice and three times over.
    light = model if with_loss else _light_layers(model)
    parts = [_exchange(part, task) for part in (nn.Sequential(next(iter(model))), light)]
    return fields | _lines(parts, budget_s)


def _lines(sizes: Sequence[_Sized], budget_s: float) -> dict[str, float]:
    """Return the cost of a call and of a byte of every kind of work, from something small and something large."""
    small, large = sizes
    fields = {}
    for kind in small.work:
        times = (_median_s(small.work[kind], budget_s), _median_s(large.work[kind], budget_s))
        fields[f"{kind}_s"], fields[f"{kind}_s_per_byte"] = line((small.size_bytes, large.size_bytes), times)
    return fields


def _light_layers(model: nn.Sequential) -> nn.Sequential:
    """Return the most first layers whose weights are small, but one at least."""
    layers: list[nn.Module] = []
    size_bytes = 0
    for layer in model:
        size_bytes += _state_bytes(layer)
        if layers and size_bytes > _LIGHT_BYTES:
            break
        layers.append(layer)
    return nn.Sequential(*layers)


def _backward_at_cut_s(model: nn.Sequential, task: _Task, *, with_loss: bool) -> float:
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
        in_one_piece.append(_training_pass(model, batch, with_loss=with_loss).backward_s[0])
        output = first(batch.inputs)
        time.sleep(_PAUSE_S)
        start = time.thread_time()
        torch.autograd.backward(output, gradient)
        alone.append(time.thread_time() - start)
    return max(0.0, min(alone) - min(in_one_piece))


def _noise_s_per_byte(module: nn.Module, budget_s: float) -> float:
    """Return what it takes to clip a part's update, to draw noise for it and to add that, for each of its bytes."""
    state = {name: value.numpy() for name, value in module.state_dict().items() if value.is_floating_point()}
    missing = _NOISED_BYTES - sum(values.nbytes for values in state.values())
    if missing > 0:  # of a small part to begin with a tensor takes longest, and it is not to count for samples
        dtype = next((values.dtype for values in state.values()), np.dtype(np.float32))
        state["more"] = np.ones(-(-missing // dtype.itemsize), dtype)
    received = {name: values - 1.0 for name, values in state.items()}  # far away: it is clipped, which takes longest
    chance = partial(random_streams.generator, 0, "noise")

    def protect() -> Callable[[], object]:
        trained = {name: values.copy() for name, values in state.items()}
        return partial(clip_and_noise, trained, received, clip=1.0, multiplier=1.0, noise=chance)

    size_bytes: int = sum(values.nbytes for values in state.values())
    return _median_s(protect, budget_s) / size_bytes


#: Gets ready what some work begins with, and returns the work.
_Ready = Callable[[], Callable[[], object]]


@dataclass(frozen=True)
class _Sized:
    """Some kinds of work on something of one size."""

    size_bytes: int
    work: Mapping[str, _Ready]


def _coding(cut_bytes: int, samples: int, task: _Task) -> _Sized:
    activation = torch.ones((samples, max(1, cut_bytes // task.dtype.itemsize)), dtype=task.dtype)
    labels = torch.zeros(samples, dtype=torch.int64)
    message = Message(Kind.GRADIENT, samples=samples, batch_samples=samples, body=tensor_body(activation))
    encode, decode = partial(tensor_body, activation, labels), partial(read_tensor, message)
    return _Sized(activation.nbytes, {"encode": lambda: encode, "decode": lambda: decode})


def _exchange(module: nn.Sequential, task: _Task) -> _Sized:
    """Return the optimiser's step and the exchange of this part of a network; its weights stay where they are."""
    part = TorchDevicePart(module, Optimizer(learning_rate=0.0), has_loss=False)
    inputs = _Batch.random(2, task.input_shape, task.classes, task.dtype).inputs

    def trained() -> Callable[[], object]:
        output = module(inputs)
        if output.requires_grad:
            torch.autograd.backward(output, torch.zeros_like(output))
        return part.step

    def arrived() -> Callable[[], object]:
        return partial(part.unpack_and_install, _as_received(part.pack()), keep_momentum=False)

    work: dict[str, _Ready] = {"step": trained, "pack": lambda: part.pack, "install": arrived}
    return _Sized(max(1, _state_bytes(module)), work)


def _aggregations(model: nn.Sequential, task: _Task, *, with_loss: bool) -> list[_Sized]:
    """Return the making of a new global model from what one device and from what two have brought back.

    Most of it is at the server: the devices' networks are cut as early as they can be.
    """
    size_bytes = _state_bytes(model)
    fits = size_bytes <= _AGGREGATED_BYTES and 2 * _AGGREGATED_COPIES * size_bytes <= _free_bytes()
    layers = model if with_loss and fits and task.memory_bytes is None else _light_layers(model)
    network = copy.deepcopy(layers)
    names = ("one", "two")
    cuts = dict.fromkeys(names, _first_cut(network))
    learner = TorchLearner(network, cuts, LearnerSettings(Optimizer(), task.classes))

    def returned(devices: tuple[str, ...]) -> Callable[[], object]:
        brought = [TrainedPart(device, _as_received(learner.pack(device)), 1) for device in devices]
        return partial(learner.aggregate, brought)

    return [
        _Sized(max(1, len(devices) * learner.model_bytes()), {"aggregate": partial(returned, devices)})
        for devices in (names[:1], names)
    ]


def _first_cut(model: nn.Sequential) -> int:
    """Return the first split point that no weight lies on both sides of."""
    for split_point in range(1, len(model)):
        try:
            split_model(model, split_point)
        except PlanError:
            continue
        return split_point
    return len(model)


def _as_received(body: Body) -> Body:
    """Return a body as it arrives: in one buffer of its own."""
    return Body.of(bytearray().join(body.buffers), encoding=body.encoding)


def _median_s(ready: _Ready, budget_s: float) -> float:
    """Return the median CPU time of the work, each time from rest."""
    ready()()
    budget = _Budget(budget_s)
    times: list[float] = []
    while budget.wants_another(len(times)):
        work = ready()
        time.sleep(_PAUSE_S)
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return median(times)
