"""Measuring a network on this machine, layer by layer; paper III-C, phase 1.

Times are CPU times of one thread: another program on the machine makes the measurement longer, but not the times. A
machine too small for the whole network measures as many of its first layers as it can hold.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue

import torch
from torch import nn

from pipar.cutting.placing import placed
from pipar.cutting.split import named_layers, some_layers
from pipar.errors import ConfigError
from pipar.methods import Plan
from pipar.networks.models import uses_batch_statistics
from pipar.nn.runtime import keep_freed_memory, one_thread, release_freed_memory, release_model_memory
from pipar.profiling import repeated_timing
from pipar.profiling.cache import machine_fingerprint, usable_cores
from pipar.profiling.coding_costs import changes_in_a_round, coding_times, run_through
from pipar.profiling.contention import measure_contention
from pipar.profiling.layer_times import layer_profiles, measure_passes, training_pass
from pipar.profiling.machine_load import OtherPrograms
from pipar.profiling.measurement_task import Batch, Measurement, free_bytes, some_samples, state_bytes
from pipar.profiling.memory import largest_prefix, training_bytes
from pipar.profiling.operation_counter import count_layers
from pipar.profiling.overheads import measure_overheads
from pipar.profiling.profile import CodingTimes, LayerProfile, Profile, batch_sizes
from pipar.profiling.repeated_timing import Budget
from pipar.tensors.relu_outputs import rectified_cuts
from pipar.tensors.torch_device import TorchDevice
from pipar.units import format_bytes

#: Other cores that compute while contention is measured: enough to fill caches and memory.
_MOST_OTHERS = 15


def measure_profile(wanted: Measurement) -> Profile:
    """Return the times and sizes of every layer and of the work around training, measured in about `budget_s` seconds.

    One pass is a training pass of the whole network in train mode on one thread; the last layer includes the loss.
    Each time is the median of at least three passes, unless a single pass uses up the budget. A copy of the model is
    measured: its weights, gradients and running statistics do not change. `progress` is called in this thread.
    """
    shares: SimpleQueue[float | None] = SimpleQueue()
    is_wanted = True

    def tell(share: float) -> None:
        if not is_wanted:
            raise InterruptedError  # the caller has stopped waiting, as after Ctrl-C
        shares.put(share)

    task = replace(wanted, progress=tell)
    keep_freed_memory()  # like the processes of a run
    # In a separate thread, like the stages of a run: in the main thread, memory is returned to the system more
    # often, and a full batch of VGG-5 took 12 to 15 % longer.
    with ThreadPoolExecutor(1, thread_name_prefix="measure") as thread:
        measured = thread.submit(_measure, task)
        measured.add_done_callback(lambda _: shares.put(None))
        try:
            for share in iter(shares.get, None):
                wanted.progress(share)
        except BaseException:
            is_wanted = False
            raise
    release_model_memory(state_bytes(wanted.model))  # a server or a device may continue in this process
    return measured.result()


def _measure(task: Measurement) -> Profile:
    # Dropout draws from the CPU's generator, and the random numbers of a run must not depend on profiling.
    with one_thread(), torch.random.fork_rng(devices=[]):
        others = OtherPrograms()
        sizes = _sizes_only(task)
        attempt = _first_attempt(sizes, task)
        measured = _measured(attempt, sizes, task)
        while measured is None:
            gc.collect()  # the failed attempt's memory may be in reference cycles
            release_freed_memory()
            attempt = attempt.smaller(len(task.model), task)
            measured = _measured(attempt, sizes, task)
    task.progress(1.0)
    return replace(measured, busy_cores=round(others.cores(), 2))


# --- what fits ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attempt:
    """A number of layers, measured in batches of these sizes."""

    layers: int
    batch_sizes: tuple[int, ...]

    def smaller(self, all_layers: int, task: Measurement) -> _Attempt:
        """Return the next attempt after one for which the system had no memory.

        The whole network needs the whole batch; otherwise a layer is left out. Fewer layers can train in micro-batches.
        """
        if self.layers < all_layers and len(self.batch_sizes) > 1:
            return replace(self, batch_sizes=self.batch_sizes[:-1])
        if self.layers == 1:
            raise _too_little(task, "the memory that the system gives this process")
        return replace(self, layers=self.layers - 1)


def _sizes_only(task: Measurement) -> Profile:
    """Return the profile of the whole network without times, from a few samples."""
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
                tensor_bytes=count.tensor_bytes(dtype),
                parameter_bytes=count.parameter_bytes(dtype),
                saved_bytes=count.saved_bytes(dtype),
                working_bytes=count.working_bytes(dtype),
                frozen_bytes=count.frozen_bytes(dtype),
                trained=count.trained,
            )
            for count in count_layers(task.model, task.form, run=True, task=task.training)
        ),
        machine=machine_fingerprint(task.torch_device.hardware),
        accelerator=task.torch_device.hardware,
        autocast="bf16" if task.torch_device.autocast else "off",
        optimizer=task.optimizer.kind,
        state_copies=task.optimizer.state_copies(task.model),
    )


def _first_attempt(sizes: Profile, task: Measurement) -> _Attempt:
    """Return the most layers, and the batch sizes, that fit into the given memory."""
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


def _too_little(task: Measurement, memory: str) -> ConfigError:
    return ConfigError(
        f"Not even the first layer of {task.model_name} fits into {memory}: give more memory, or a smaller "
        "run.batch_size."
    )


def _measured(attempt: _Attempt, sizes: Profile, task: Measurement) -> Profile | None:
    """Return the profile of these layers; None if the system had no memory for them."""
    try:
        return _measure_layers(attempt, sizes, task)
    except (RuntimeError, MemoryError) as error:
        if not _is_about_memory(error):
            raise
    return None


def _is_about_memory(error: Exception) -> bool:
    """Return True for the messages of torch, of its kernels and of C++ about memory."""
    words = ("memory", "bad_alloc", "could not create a primitive")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _measure_layers(attempt: _Attempt, sizes: Profile, task: Measurement) -> Profile:
    whole = attempt.layers == len(task.model)
    model = _first_layers(task.model, attempt.layers).to(task.dtype).train()
    batches = [Batch.random(size, task.form, task.training, task.dtype) for size in attempt.batch_sizes]
    device = task.torch_device
    here = placed(model, device)
    batches = [batch.on(device) for batch in batches]
    budget = Budget(0.8 * task.budget_s)
    passes = measure_passes(here, batches, budget, task.progress, with_loss=whole, device=device)
    measured = layer_profiles(sizes, passes, attempt.batch_sizes)
    layers, coding, (changes_share, changes) = _with_coding(measured, model, attempt, task)
    overheads = measure_overheads(model, here, layers[0].output_bytes, task, with_loss=whole)
    coding = {name: _with_message(times, overheads) for name, times in coding.items()}
    coding["changes"] = changes
    crowded = _contention(here, batches, sizes, task, with_loss=whole) if whole else ()
    return replace(
        sizes,
        layers=layers,
        crowded=crowded,
        crowd=_others() if crowded else 0,
        total_layers=0 if whole else len(task.model),
        coding=coding,
        changes_share=changes_share,
        how=_how(attempt, sizes, len(passes[-1]), device),
        **overheads,  # type: ignore[arg-type]
    )


def _others() -> int:
    """Return how many other cores compute while contention is measured: all, or enough to fill caches and memory."""
    return min(usable_cores() - 1, _MOST_OTHERS)


def _contention(
    model: nn.Sequential, batches: Sequence[Batch], sizes: Profile, task: Measurement, *, with_loss: bool
) -> tuple[float, ...]:
    """Return the contention of other cores; empty if there are none, or no memory for copies of the network."""
    others = _others()
    # Each needs a copy of the network and a batch's activations; a device with little memory is not a server.
    needed = others * training_bytes(sizes, Plan(len(sizes.layers), 1), task.batch_size)
    if others < 1 or task.memory_bytes is not None or needed > free_bytes() / 2:
        return ()

    def run(network: nn.Sequential, number: int) -> object:
        return training_pass(network, batches[number], with_loss=with_loss, device=task.torch_device)

    return measure_contention(model, len(batches), run, others=others, budget_s=0.5 * task.budget_s)


def _how(attempt: _Attempt, sizes: Profile, passes: int, device: TorchDevice) -> str:
    count = f"{passes} training pass{'es' if passes > 1 else ''}"
    how = f"median CPU time of {count} on one thread" if device.is_cpu else f"median time of {count} on {device.name}"
    largest = attempt.batch_sizes[-1]
    return how if largest == sizes.batch_sizes[-1] else f"{how}, above a batch of {largest} in proportion to it"


def _first_layers(model: nn.Sequential, layers: int) -> nn.Sequential:
    """Return a copy of the first layers, which keep their names; the others are not copied."""
    return copy.deepcopy(some_layers(model, list(named_layers(model))[:layers]))


# --- what crosses the cuts ------------------------------------------------------------------------------------


def _with_coding(
    layers: tuple[LayerProfile, ...], model: nn.Sequential, attempt: _Attempt, task: Measurement
) -> tuple[tuple[LayerProfile, ...], dict[str, CodingTimes], tuple[float, CodingTimes]]:
    """Return the layers with the encodings' shares at the cut after each, the encodings' times, and those of changes.

    All are from one pass over a quarter of a batch, or less if memory is short. The times are those at the first cut
    after a ReLU, where all encodings are possible, or else at the first cut.
    """
    samples = min(attempt.batch_sizes[-1], max(attempt.batch_sizes[0], task.batch_size // 4))
    batch = some_samples(samples, task)
    crossings = run_through(model, batch, with_loss=attempt.layers == len(task.model))
    changes = changes_in_a_round(model)
    model.zero_grad(set_to_none=True)
    rectified = task.rectified if task.rectified is not None else rectified_cuts(task.model, task.form)
    found = list(layers)
    for place, crossing in enumerate(crossings, start=1):
        found[place - 1] = replace(found[place - 1], shares=crossing.shares(rectified=place in rectified))
    known = [replace(layer, rectified=place in rectified) for place, layer in enumerate(found, start=1)]
    cut = min((place for place in rectified if place <= len(crossings)), default=1)
    return tuple(known), coding_times(crossings[cut - 1], repeated_timing.PAUSE_S) if crossings else {}, changes


def _with_message(times: CodingTimes, overheads: Mapping[str, float]) -> CodingTimes:
    """Return an encoding's times with the cost of starting a message, which mostly comes with its first chunk.

    The cost of reading a message is counted once for a tensor, with any encoding.
    """
    return replace(times, encode_s=max(times.encode_s, overheads["encode_s"]))
