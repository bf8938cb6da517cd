"""The cost of planning when the bandwidth of 100 boards switches between 4g, 4g+ and wifi every minute; paper V-F-3.

Plans are chosen in the background, so no round waits for them. Measured are the CPU time of the searches relative to
the training time, and the gain of the new plans: none where rounds are so long that the links have changed again
before new plans take effect, but no loss either.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.record import Claim
from pipar.job.prepare import prepare_timing_only
from pipar.launch.rehearsal import rehearse
from pipar.planner.learned_costs import predict_s
from pipar.settings.config_file import config_from
from reproduction.replanning_cost import replanning_cost

NETWORKS = ("vgg5", "resnet18", "mobilenetv3_small")
TRAINING_S = 600.0


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:  # noqa: ARG001
    claims, details = [], {}
    for model in NETWORKS:
        found = _train(model, replan=True)
        fixed = _train(model, replan=False, epochs=found["epochs"])
        share = 100 * found["planning_s"] / found["training_s"]
        claims.append(Claim(f"CPU seconds of planning / seconds of training, {model}", share, "%", most=0.5))
        gained = fixed["training_s"] / found["training_s"]
        claims.append(Claim(f"time with the first plans / time with new ones, {model}", gained, "", least=0.99))
        details[model] = {"replanned": found, "first_plans_kept": fixed}
    return claims, details


def _train(model: str, *, replan: bool, epochs: int | None = None) -> dict[str, float | int]:
    config = config_from(
        {
            "run": {"epochs": epochs or 1, "trace": "off"},
            "model": {"name": model, "norm": "batch"},
            "data": {"name": "cifar10", "samples_per_device": 500, "validation": 0, "test": 0},
            "plan": {"replan": replan},
            "server": {"profile": "i7-11850h"},
            "devices": [
                {
                    "count": 100,
                    "profile": "raspberry-pi-3b",
                    "link": {"cycle": ["4g", "4g+", "wifi"], "every": "60s"},
                }
            ],
        }
    )
    job = prepare_timing_only(config, rehearse)
    assert job is not None
    if epochs is None:
        first = predict_s(job.fleet(), job.plans)
        run = job.config.run.model_copy(update={"epochs": max(5, round(TRAINING_S / first))})
        job = replace(job, config=job.config.model_copy(update={"run": run}))
    return replanning_cost(job)
