"""Ten devices drawn for each of 50 rounds, from 100 and from 1,000, in virtual time: what the server holds of them.

Counted are the tensors of the server: the global model, all replicas, and the parts of the model that are packed to be
sent. What devices hold in the same process is not.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import benchmarks.many_devices
from benchmarks.record import Claim
from pipar.events import Drawn, Event
from pipar.job.job import Job
from pipar.job.model_setup import make_learner
from pipar.job.prepare import prepare
from pipar.job.workload import Workload
from pipar.launch.rehearsal import rehearse
from pipar.launch.virtual import train_virtually
from pipar.nn.learner import TorchLearner
from pipar.settings.config_file import config_from

DRAWN, ROUNDS = 10, 50


def configuration(devices: int, rounds: int = ROUNDS, drawn: int = DRAWN) -> dict[str, Any]:
    """Return the training of a tiny network, of which ten devices are drawn for each round."""
    tree = dict(benchmarks.many_devices._TREE)
    run = {"name": "drawn", "epochs": rounds, "batch_size": 10, "trace": "off", "devices_per_round": drawn}
    tree |= {"run": run, "server": {"cores": 2}, "devices": [{"name": "board", "count": devices, "speed": 1.0}]}
    return tree


class Watch:
    """Counts the draws of each device, and the most that the server holds."""

    def __init__(self, learner: TorchLearner) -> None:
        self._learner = learner
        self.draws: Counter[str] = Counter()
        self.rounds: list[tuple[str, ...]] = []
        self.most_replicas = 0
        self.most_bytes = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, Drawn):
            self.draws.update(event.devices)
            self.rounds.append(event.devices)
        self.most_replicas = max(self.most_replicas, len(self._learner._replicas))
        self.most_bytes = max(self.most_bytes, held_bytes(self._learner))


def held_bytes(learner: TorchLearner) -> int:
    """Return the bytes of the server's tensors: the model, the replicas, and packed parts."""
    replicas = [tensor for replica in learner._replicas.values() for tensor in replica.module.state_dict().values()]
    packed = sum(body.size_bytes for body in learner._packed.values())
    return learner.model_bytes() + sum(tensor.nbytes for tensor in replicas) + packed


def train(devices: int, rounds: int = ROUNDS, drawn: int = DRAWN) -> tuple[Watch, Job]:
    """Train in virtual time; return what was seen, and the job."""
    workload = Workload(config_from(configuration(devices, rounds, drawn)))
    job = prepare(workload, rehearse)
    learner = make_learner(job, workload)
    watch = Watch(learner)
    train_virtually(job, workload, lambda *_: None, watch.observe, learner)
    return watch, job


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    os.environ.setdefault("XDG_CACHE_HOME", str(folder))
    torch.set_num_threads(1)
    seen, details = {}, {}
    for devices in (100, 1000):
        began = time.monotonic()
        watch, job = train(devices)
        seen[devices] = watch
        mean = ROUNDS * DRAWN / devices
        away = max(abs(watch.draws[name] - mean) for name in job.sizes)
        details[str(devices)] = {
            "most_replicas": watch.most_replicas,
            "most_bytes": watch.most_bytes,
            "furthest_from_the_mean": away,
            "real_s": time.monotonic() - began,
        }
    ratio = seen[1000].most_bytes / seen[100].most_bytes
    furthest = max(float(one["furthest_from_the_mean"]) for one in details.values())  # type: ignore[index]
    return [
        Claim("tensors of the server, 10 of 1,000 devices a round / 10 of 100", ratio, "", most=1.01),
        Claim("most replicas at any time, 10 of 1,000 devices", seen[1000].most_replicas, "", most=DRAWN),
        Claim("draws of a device, furthest from the mean of all", furthest, "", most=1.0),
    ], details
