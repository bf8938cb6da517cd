"""Timing plans by a short timing-only run: for methods that the planner's simulator does not cover."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pipar.events import EpochResult, ignore
from pipar.execution.spans import COMPUTE, DOWNLINK, IO, SERVER, UPLINK, Span, by_lane
from pipar.job.job import Job
from pipar.planner.timing import Timing

#: Kinds of spans that count as work of a lane: the stages of iterations, and models on the links.
_COUNTED = frozenset({"fc", "bc", "step", "u", "decode", "fs", "bs", "encode", "d", "model"})


def rehearse(job: Job, iterations: int | None) -> Timing:
    """Return the timing of a job's first iterations, or of a whole epoch, measured in a timing-only run."""
    from pipar.launch.virtual import train_timing_only  # imports numpy, without which commands start faster

    fleet, run = job.fleet(), job.config.run
    update = {"epochs": 1, "patience": None, "keep": "last", "trace": "full"}
    sizes = job.sizes
    if iterations is not None:
        update["local_epochs"] = 1
        sizes = {name: sum(fleet.batches(size, iterations)) for name, size in sizes.items()}
    short = replace(
        job,
        config=job.config.model_copy(update={"run": run.model_copy(update=update)}),
        sizes=sizes,
    )
    results: list[tuple[EpochResult, list[Span]]] = []
    train_timing_only(short, lambda result, spans: results.append((result, spans)), ignore)
    ((result, spans),) = results
    lanes = by_lane(span for span in spans if span.epoch == 1 and not span.waiting)
    start = min(span.start for name in job.sizes for span in lanes[name, IO])

    own = {
        name: tuple(_busy_s(lanes.get((name, lane), [])) for lane in (COMPUTE, UPLINK, DOWNLINK)) for name in job.sizes
    }
    device, uplink, downlink = (max(of) for of in zip(*own.values(), strict=True))
    cores = [of for (owner, _), of in lanes.items() if owner == SERVER]
    return Timing(
        epoch_s=result.seconds,
        ends={
            name: tuple(span.end - start for span in lanes[name, COMPUTE] if span.kind == "step") for name in job.sizes
        },
        busy_s={
            "device": device,
            "uplink": uplink,
            "server": sum(map(_busy_s, cores)) / job.cores,
            "downlink": downlink,
        },
        own_s=own,
    )


def _busy_s(spans: Iterable[Span]) -> float:
    return sum(span.end - span.start for span in spans if span.kind in _COUNTED)
