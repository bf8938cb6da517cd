"""A small training for deployments of real processes, and what must be true after it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.torch

from pipar.job.workload import Workload
from pipar.settings.config_file import config_from
from support.programs import Place
from support.reference import Rules, State, average, step
from support.training import EXACT, largest_error
from support.waiting import until

BATCH = 10
RULES = Rules()


def training(**run: Any) -> dict[str, Any]:
    """Return a training of three devices on shares of synthetic data, with a fixed cut and two micro-batches."""
    return {
        "run": {"name": "it", "epochs": 6, "batch_size": BATCH, **run},
        "model": {"factory": "support.gated:network", "dtype": "float64"},
        "data": {
            "name": "synthetic", "shape": [1, 4, 4], "classes": 10, "samples_per_device": [40, 35, 23],
            "validation": 10, "test": 10,
        },
        "plan": {"split_point": 2, "micro_batches": 2},
        # Most tests hold a device, or run beside others on a busy machine: how long they take must not matter.
        "server": {"cores": 1, "min_devices": 1, "resume_window": "2s", "round_deadline": "off", "keepalive": "30s"},
        "devices": [{"name": "pi", "count": 3}],
    }  # fmt: skip


def recomputed(tree: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], rules: Rules = RULES) -> State:
    """Return the weights that a round log implies, by plain PyTorch: the average over the devices that counted."""
    workload = Workload(config_from(tree))
    model = workload.network().train()
    for entry in rounds:
        states, counts = [], []
        for name in sorted(entry["counted"]):
            own, shard = copy.deepcopy(model), workload.samples.shard(name)
            optimizer, order = rules.optimizer(own), shard.order(entry["epoch"])
            for positions in np.split(order, range(BATCH, len(order), BATCH)):
                step(own, [optimizer], shard.batch(entry["epoch"], positions), rules, ())
            states.append(own.state_dict())
            counts.append(len(shard))
        assert dict(zip(sorted(entry["counted"]), counts, strict=True)) == entry["counted"]
        model.load_state_dict(average(states, counts))
    return model.state_dict()


def final_model(at: Place) -> State:
    return safetensors.torch.load_file(at.run_folder / "model.safetensors")


def check_weights(at: Place, tree: Mapping[str, Any], rules: Rules = RULES) -> None:
    """Check that the weights follow from the round log, and that the log has every round once."""
    rounds, state = at.rounds(), final_model(at)
    assert [entry["epoch"] for entry in rounds] == list(range(1, tree["run"]["epochs"] + 1))
    assert at.result()["rounds"] == rounds
    expected = recomputed(tree, rounds, rules)
    assert largest_error({name: state[name] for name in expected}, expected) < EXACT


def check_nothing_is_left(at: Place) -> None:
    until(lambda: not at.alive(), "all processes to end")
    assert at.leftovers() == []


def counted(at: Place) -> list[set[str]]:
    return [set(entry["counted"]) for entry in at.rounds()]
