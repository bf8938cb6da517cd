"""Fit the form of a machine's cost model to this one: `python -m benchmarks.fit_machines` prints rates and residuals.

The named machines of `profiling/machines.py` have rates in these proportions, scaled by published numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from pipar.networks.models import build_model
from pipar.profiling.measure import measure_profile
from pipar.profiling.measurement_task import Measurement
from pipar.profiling.operation_counter import count_layers
from pipar.profiling.operation_counts import Counts, PassCount
from pipar.profiling.profile import Profile
from pipar.tasks.task import classification
from pipar.tensors.inputs import InputForm

CASES = [
    ("vgg5", "group", (3, 32, 32)),
    ("vgg5", "batch", (1, 32, 32)),
    ("resnet18", "group", (3, 32, 32)),
    ("resnet18", "batch", (3, 64, 64)),
    ("mobilenetv3_small", "group", (3, 32, 32)),
    ("mobilenetv3_small", "batch", (3, 64, 64)),
]
BATCH = 100


def measure(case: tuple[str, str, tuple[int, int, int]], budget_s: float) -> tuple[Profile, Counts]:
    name, norm, shape = case
    model = build_model(name, input_shape=shape, classes=10, norm=norm)
    form = InputForm.given(shape)
    wanted = Measurement(
        model=model, model_name=name, form=form, training=classification(10), batch_size=BATCH, budget_s=budget_s
    )
    profile = measure_profile(wanted)
    return profile, count_layers(model, shape)


def row(count: PassCount, samples: int) -> list[float]:
    """Return the factors of the unknown costs: multiply-adds of each kind, elements, calls."""
    elements = samples * count.elements + count.fixed_elements
    return [samples * count.dense, samples * count.grouped, elements, count.calls]


def fit(measured: Sequence[tuple[Profile, Counts]]) -> np.ndarray:
    """Return seconds of a dense and a grouped multiply-add, an element and a call, by least squares of logarithms.

    Fitted to whole stages, forward and backward of all layers before and after each cut: single layers scatter more
    than the sums that the planner uses. Every network has the same weight, for any number of cuts.
    """
    rows, times, weights = [], [], []
    for profile, counts in measured:
        layers = list(zip(profile.layers, counts, strict=True))
        for at, size in enumerate(profile.batch_sizes):
            for cut in range(1, len(layers)):
                for part in (layers[:cut], layers[cut:]):
                    for way in ("forward", "backward"):
                        times.append(sum(getattr(layer, f"{way}_s")[at] for layer, _ in part))
                        rows.append(np.sum([row(getattr(count, way), size) for _, count in part], axis=0))
                        weights.append(len(layers) ** -0.5)
    work, logs, weight = np.array(rows), np.log(times), np.array(weights)
    found = least_squares(
        lambda costs: weight * (np.log(work @ np.exp(costs)) - logs), np.log([4e-11, 1e-9, 1e-9, 5e-5]), loss="soft_l1"
    )
    errors = np.log(work @ np.exp(found.x)) - logs
    middle, rms = np.median(np.abs(errors)), np.sqrt((errors**2).mean())
    print(f"{len(times)} stages: off by {np.expm1(middle):.0%} in the median, by a factor of {np.exp(rms):.2f} rms")
    return np.exp(found.x)


def main(budget_s: float) -> None:
    measured = [measure(case, budget_s) for case in CASES]
    costs = fit(measured)
    print("dense {:.3g} MAC/s, grouped {:.3g} MAC/s, elements {:.3g}/s, call {:.3g} s".format(*1 / costs[:3], costs[3]))
    for case, (profile, counts) in zip(CASES, measured, strict=True):
        for at, size in enumerate(profile.batch_sizes):
            found = [
                sum(np.dot(row(getattr(count, way), size), costs) for count in counts)
                / sum(getattr(layer, f"{way}_s")[at] for layer in profile.layers)
                for way in ("forward", "backward")
            ]
            print(*case, f"batch {size}: predicted / measured {found[0]:.2f} forward, {found[1]:.2f} backward")
        names = ("step", "encode", "decode", "pack", "install", "aggregate")
        print({n: (getattr(profile, f"{n}_s"), 1 / max(1e-15, getattr(profile, f"{n}_s_per_byte"))) for n in names})


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 8.0)
