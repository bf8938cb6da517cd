"""How long the layers take if several threads compute them, and which number of threads is the fastest.

One thread is the fastest for small layers, and while other programs keep the cores busy: the threads wait for each
other after every operation. So numbers of threads are compared by time that has passed, in turns.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median

import torch

from pipar.cutting.split import named_layers, some_layers
from pipar.methods import Plan
from pipar.nn.runtime import compute_with, one_thread
from pipar.profiling.layer_times import Pass, layer_profiles, one_round
from pipar.profiling.machine_load import OtherPrograms
from pipar.profiling.measurement_task import Batch, Measurement
from pipar.profiling.memory import training_bytes
from pipar.profiling.profile import Profile
from pipar.profiling.repeated_timing import Budget

#: Several threads have to take at most this share of one thread's time: they also take the cores from other programs.
_WORTH_IT = 0.9


def numbers_to_try(cores: int) -> tuple[int, ...]:
    """Return the numbers of threads that are compared with one: 2, 4, 8 and so on, and all cores.

    >>> numbers_to_try(6)
    (2, 4, 6)
    >>> numbers_to_try(1)
    ()
    """
    powers = [2**power for power in range(1, cores.bit_length()) if 2**power < cores]
    return (*powers, cores) if cores > 1 else ()


def with_threads(wanted: Measurement, one: Profile, numbers: Sequence[int]) -> Profile:
    """Return the profile with the layers' times on as many threads as are fastest, among one and these numbers.

    `one` is the profile on one thread. It is returned if there is no memory for another measurement.
    """
    measured = _measured(wanted, one, numbers)
    if measured is None:
        return one
    found = [_compared(one, measured, number) for number in numbers]
    best = min(found, key=_share_of_time)
    return best if _share_of_time(best) <= _WORTH_IT else one


def on_threads(wanted: Measurement, one: Profile, number: int) -> Profile:
    """Return the profile with the layers' times on this number of threads, whether or not that is faster."""
    measured = _measured(wanted, one, (number,))
    return replace(one, threads=number) if measured is None else _compared(one, measured, number)


@dataclass(frozen=True)
class _Measured:
    """Passes by number of threads and batch, the sizes of the batches, and the cores that other programs used."""

    passes: dict[int, list[list[Pass]]]
    batch_sizes: tuple[int, ...]
    busy_cores: float


def _measured(wanted: Measurement, one: Profile, numbers: Sequence[int]) -> _Measured | None:
    """Return passes on one and on these numbers of threads; None if the system has no memory for them."""
    # In a separate thread, like the stages of a run.
    with ThreadPoolExecutor(1, thread_name_prefix="measure") as thread:
        try:
            return thread.submit(_in_turns, wanted, one, (1, *numbers)).result()
        except (RuntimeError, MemoryError):
            return None


def _in_turns(wanted: Measurement, one: Profile, numbers: Sequence[int]) -> _Measured:
    with one_thread(), torch.random.fork_rng(devices=[]):
        others, sizes = OtherPrograms(), _fitting(wanted, one)
        layers = list(named_layers(wanted.model))[: len(one.layers)]
        model = copy.deepcopy(some_layers(wanted.model, layers)).to(wanted.dtype).train()
        batches = [Batch.random(size, wanted.form, wanted.training, wanted.dtype) for size in sizes]
        passes: dict[int, list[list[Pass]]] = {}
        budget = Budget(wanted.budget_s)
        for is_warm in (False, True):
            passes = {number: [[] for _ in batches] for number in numbers}
            while budget.wants_another(len(passes[1][-1])):
                for number in numbers:
                    compute_with(number)
                    one_round(
                        model, batches, passes[number], with_loss=one.whole, rests=is_warm, clock=time.perf_counter
                    )
                if not is_warm:
                    break
            if budget.spent() >= 2.0:
                break
        return _Measured(passes, sizes, round(others.cores(), 2))


def _fitting(wanted: Measurement, one: Profile) -> tuple[int, ...]:
    """Return the sizes of the batches that fit into memory."""
    sizes, most = one.batch_sizes, wanted.memory_bytes
    if most is None:
        return sizes
    plan = Plan(len(one.layers), 1)
    return tuple(size for size in sizes if training_bytes(one, plan, size) <= most) or sizes[:1]


def _compared(one: Profile, measured: _Measured, number: int) -> Profile:
    """Return the profile on a number of threads, with the factors by which one thread takes longer."""
    sizes = measured.batch_sizes
    factors = [
        _pass_s(alone) / max(_pass_s(together), 1e-9)
        for alone, together in zip(measured.passes[1], measured.passes[number], strict=True)
    ]
    factors += factors[-1:] * (len(one.batch_sizes) - len(sizes))
    return replace(
        one,
        layers=layer_profiles(one, measured.passes[number], sizes),
        threads=number,
        one_thread=tuple(factors),
        busy_cores=max(one.busy_cores, measured.busy_cores),
        how=f"{one.how}; layers by time passed on {number} threads",
    )


def _pass_s(passes: Sequence[Pass]) -> float:
    return median(sum(one.forward_s) + sum(one.backward_s) for one in passes)


def _share_of_time(profile: Profile) -> float:
    """Return the share of one thread's time that a pass takes, as the mean of all batch sizes."""
    return sum(1 / factor for factor in profile.one_thread) / len(profile.one_thread)
