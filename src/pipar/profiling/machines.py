"""Machines known by name, for planning without having them: profiles from counts and a handful of rates.

    forward(b) = calls c + fixed / e + b (dense / d + grouped / g + elements / e)

and the backward likewise with its own counts; d, g and e are multiply-adds and elements per second, c seconds per call.
docs/explanation/profiles.md explains where the formula and the rates come from, and how accurate they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipar.profiling.operation_counts import Counts, LayerCount, PassCount
from pipar.profiling.profile import CodingTimes, LayerProfile, Profile, batch_sizes, item_bytes

_GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """What a machine computes in a second for one stage, in float32; on a board, all cores compute one stage.

    `cores` is the number of stages that it computes at the same time, each at these rates, and `threads` the number of
    its cores that compute each of them; `memory_bytes` is what the
    system leaves to a process; `how` says where the numbers come from.
    """

    name: str
    title: str
    cores: int
    memory_bytes: int
    dense_macs_per_s: float
    grouped_macs_per_s: float
    elements_per_s: float
    call_s: float
    load_s: float
    copy_bytes_per_s: float
    how: str
    threads: int = 1


_SCALED = (
    "Scaled, not measured: the proportions of the rates were fitted to torch 2.13 on an x86 core, their size follows "
    "commonly published figures that were not checked. "
)
_HOW_CODING = (
    " Encodings take as many calls and copies of memory as on that core; the share of bytes that they leave was "
    "measured for the known networks on CIFAR-10. Noise takes as many copies a value as on that core."
)

MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            "raspberry-pi-3b",
            "Raspberry Pi 3B, 4 x Cortex-A53 1.2 GHz, 1 GB",
            cores=1,
            threads=4,
            memory_bytes=800 * 2**20,
            dense_macs_per_s=5e9,
            grouped_macs_per_s=0.26e9,
            elements_per_s=0.4e9,
            call_s=4e-4,
            load_s=1.2e-4,
            copy_bytes_per_s=0.9e9,
            how=_SCALED + "Linpack of all four cores together, about 6.2 GFLOP/s in double precision, twice that in "
            "single, 80 % of it in convolutions; elements at the memory's 2 GB/s (STREAM).",
        ),
        Machine(
            "raspberry-pi-5",
            "Raspberry Pi 5, 4 x Cortex-A76 2.4 GHz, 4 GB",
            cores=1,
            threads=4,
            memory_bytes=7 * _GIB // 2,
            dense_macs_per_s=25e9,
            grouped_macs_per_s=1.7e9,
            elements_per_s=2.6e9,
            call_s=1e-4,
            load_s=3e-5,
            copy_bytes_per_s=5e9,
            how=_SCALED + "Linpack of all four cores together, about 31 GFLOP/s in double precision, twice that in "
            "single, 80 % of it in convolutions; elements at the memory's 13 GB/s (STREAM).",
        ),
        Machine(
            "jetson-orin-nano",
            "Jetson Orin Nano, 6 x Cortex-A78AE 1.5 GHz, 8 GB, without its GPU",
            cores=1,
            threads=6,
            memory_bytes=13 * _GIB // 2,
            dense_macs_per_s=23e9,
            grouped_macs_per_s=2.1e9,
            elements_per_s=3.3e9,
            call_s=1.2e-4,
            load_s=3.6e-5,
            copy_bytes_per_s=8e9,
            how=_SCALED + "The processor alone, all six cores together: 8 multiply-adds a cycle and core, of which as "
            "large a share is reached as on the like Cortex-A76 of a Raspberry Pi 5; elements by clock and cores.",
        ),
        Machine(
            "i7-11850h",
            "Intel Core i7-11850H, 8 cores, 16 GB",
            cores=8,
            memory_bytes=15 * _GIB,
            dense_macs_per_s=27e9,
            grouped_macs_per_s=0.78e9,
            elements_per_s=1.2e9,
            call_s=4e-5,
            load_s=1.2e-5,
            copy_bytes_per_s=8e9,
            how=_SCALED + "Each of eight cores by itself: 16 multiply-adds a cycle at 3.2 GHz with all of them busy, "
            "54 % of it reached, as on the core of the fit; elements at an eighth of the memory's 38 GB/s (STREAM).",
        ),
    )
}

#: The cost of the work around the layers, by the fit: calls, and copies of each byte. Encoding copies nothing.
_AROUND = {
    "encode": (6, 0.0),
    "decode": (4, 1.0),
    "step": (16, 3.5),
    "pack": (16, 3.0),
    "install": (16, 3.5),
    "aggregate": (10, 7.0),
}
_CALLS_AT_CUT = 2
#: Clipping a float32, drawing Gaussian noise for it and adding that takes as long as this many copies of it.
_NOISE_COPIES = 48.0
#: The cost of each encoding likewise: calls and copies of a byte, to encode a chunk and to decode one. Measured on the
#: core of the fit, which takes 40 us for a call and copies 8 GB per second.
_CODING = {
    "sparse": (5, 4.5, 2, 8.0),
    "planes": (3, 7.0, 1, 5.0),
    "sparse-planes": (4, 10.5, 1, 12.0),
    "fp16": (5, 7.0, 1, 6.0),
    "bf16": (4, 6.0, 1, 3.0),
    "int8": (5, 12.0, 1, 4.0),
    "topk": (5, 6.0, 1, 3.0),
    # Of models: 4 times as long as planes to encode as many bytes, and 2.5 times as long to decode them.
    "changes": (0, 28.0, 0, 13.0),
}


def machine_profile(
    machine: Machine,
    counts: Counts,
    *,
    model: str,
    dtype: str,
    batch_size: int,
    batch_statistics: bool = False,
    changes_share: float = 1.0,
) -> Profile:
    """Return the profile that a named machine would have of this network, at the batch sizes that are measured.

    Its steps are those of SGD with momentum.
    """
    sizes = batch_sizes(batch_size, batch_statistics=batch_statistics)
    around = {
        key: value
        for kind, (calls, copies) in _AROUND.items()
        for key, value in (
            (f"{kind}_s", calls * machine.call_s),
            (f"{kind}_s_per_byte", copies / machine.copy_bytes_per_s),
        )
    }
    return Profile(
        model=model,
        dtype=dtype,
        batch_sizes=sizes,
        layers=tuple(_layer(machine, count, dtype, sizes) for count in counts),
        load_s=machine.load_s,
        backward_at_cut_s=_CALLS_AT_CUT * machine.call_s,
        noise_s_per_byte=_NOISE_COPIES * item_bytes("float32") / item_bytes(dtype) / machine.copy_bytes_per_s,
        machine=machine.title,
        threads=machine.threads,
        how=machine.how + _HOW_CODING,
        coding={name: _coding_times(machine, *costs) for name, costs in _CODING.items()},
        changes_share=changes_share,
        **around,  # type: ignore[arg-type]
    )


def _coding_times(
    machine: Machine, encode_calls: float, encode_copies: float, decode_calls: float, decode_copies: float
) -> CodingTimes:
    copy_s, call_s = 1 / machine.copy_bytes_per_s, machine.call_s
    return CodingTimes(encode_calls * call_s, encode_copies * copy_s, decode_calls * call_s, decode_copies * copy_s)


def _layer(machine: Machine, count: LayerCount, dtype: str, sizes: tuple[int, ...]) -> LayerProfile:
    return LayerProfile(
        name=count.name,
        forward_s=tuple(pass_s(machine, count.forward, size, dtype) for size in sizes),
        backward_s=tuple(pass_s(machine, count.backward, size, dtype) for size in sizes),
        output_bytes=count.output_bytes(dtype),
        tensor_bytes=count.tensor_bytes(dtype),
        parameter_bytes=count.parameter_bytes(dtype),
        saved_bytes=count.saved_bytes(dtype),
        working_bytes=count.working_bytes(dtype),
        rectified=count.rectified,
        shares=count.shares,
        frozen_bytes=count.frozen_bytes(dtype),
        trained=count.trained,
    )


def pass_s(machine: Machine, count: PassCount, samples: int, dtype: str = "float32") -> float:
    """Return the seconds of one direction through a layer; in float64 everything but the calls takes twice as long."""
    each = (
        count.dense / machine.dense_macs_per_s
        + count.grouped / machine.grouped_macs_per_s
        + count.elements / machine.elements_per_s
    )
    once = count.fixed_elements / machine.elements_per_s
    return count.calls * machine.call_s + (samples * each + once) * (2.0 if dtype == "float64" else 1.0)
