"""What a simulated world trains: a tiny network on tiny data, and what it costs on the machines of that world."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pipar.data.images import Images
from pipar.job.user_objects import UserObjects
from pipar.job.workload import Workload
from pipar.privacy import accounting
from pipar.profiling.profile import CodingTimes, LayerProfile, Profile
from pipar.settings.config import Config
from pipar.settings.config_file import config_from
from pipar.tensors.inputs import InputForm
from pipar.wire import encodings
from simulation.scenario import BATCH, EVALUATION_SAMPLES, LAYERS, RECTIFIED, Scenario

INPUTS, HIDDEN, CLASSES = 4, 80, 3
DELTA = 1e-5
#: Small enough that automatically chosen encodings are worth their time on a slow link.
_SHARES = {"sparse": (0.3, 0.3), "planes": (0.2, 0.2), "sparse-planes": (0.1, 0.1)}


@dataclass(frozen=True)
class Training:
    """The configuration of a scenario's training, its network and data, and their profile."""

    config: Config
    workload: Workload
    profile: Profile

    @classmethod
    def of(cls, scenario: Scenario) -> Training:
        config = _config(scenario)
        workload = Workload(config, _network_and_data(scenario))
        return cls(config, workload, _profile(workload.build_model()))


def _config(scenario: Scenario) -> Config:
    return config_from(
        {
            "run": {
                "method": scenario.method,
                "epochs": scenario.rounds,
                "batch_size": BATCH,
                "seed": scenario.seed,
                "local_epochs": scenario.local_epochs,
                "devices_per_round": scenario.devices_per_round,
                "trace": "full" if scenario.is_traced else "off",
            },
            "model": {"dtype": "float64", "norm": "none"},
            "wire": {"encoding": scenario.encoding},
            "optimizer": {
                "learning_rate": 0.1,
                "state_at_aggregation": "keep" if scenario.keep_state else "reset",
                **({} if scenario.clip_norm is None else {"clip_norm": scenario.clip_norm}),
            },
            "server": {
                "cores": 2,
                "min_devices": scenario.min_devices,
                "round_deadline": scenario.round_deadline_s,
                "resume_window": scenario.resume_window_s,
                "keepalive": "30s",
            },
            "privacy": _privacy(scenario),
            "devices": [{"name": name} for name in scenario.names],
        }
    )


def _privacy(scenario: Scenario) -> dict[str, Any]:
    """Return the section of the configuration with which a device may send as many updates as the scenario allows."""
    privacy = scenario.privacy
    if privacy is None:
        return {}
    # Half an update more than allowed: rounding does not decide about the last one.
    target = accounting.epsilon((privacy.releases + 0.5) * accounting.cost(privacy.noise_multiplier), DELTA)
    return {"noise_multiplier": privacy.noise_multiplier, "target_epsilon": target, "delta": DELTA}


def _network_and_data(scenario: Scenario) -> UserObjects:
    """Return a network and data of every device, drawn from the seed."""
    generator = torch.Generator().manual_seed(scenario.seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(scenario.seed)
        model = _network(scenario.network)
    assert len(model) == LAYERS
    data = {}
    for name, count in scenario.samples.items():
        inputs = torch.randn((count, INPUTS), generator=generator, dtype=torch.float64)
        data[name] = Images(inputs, torch.randint(CLASSES, (count,), generator=generator))
    own = UserObjects.of(config_from({}), model, None, None, None)
    kept = None
    if scenario.evaluates:
        draw = torch.Generator().manual_seed(scenario.seed + 1)
        kept = {
            name: Images(
                torch.randn((EVALUATION_SAMPLES, INPUTS), generator=draw, dtype=torch.float64),
                torch.randint(CLASSES, (EVALUATION_SAMPLES,), generator=draw),
            )
            for name in scenario.names
        }
    return replace(own, training=data, evaluation=kept, form=InputForm.given((INPUTS,)), classes=CLASSES)


def _network(kind: str) -> nn.Sequential:
    """Return a network of three layers; the second one ends with its ReLU."""
    first: nn.Module = nn.Linear(INPUTS, HIDDEN)
    second: nn.Module = nn.ReLU()
    if kind == "batch-norm":
        second = nn.Sequential(nn.BatchNorm1d(HIDDEN), nn.ReLU())
    elif kind == "dropout":
        first = nn.Sequential(first, nn.Dropout(0.2))
    return nn.Sequential(first, second, nn.Linear(HIDDEN, CLASSES)).double()


def _profile(model: nn.Sequential) -> Profile:
    """Return what the network costs on a machine of the world: tens of milliseconds per layer."""
    layers, x = [], torch.zeros((2, INPUTS), dtype=torch.float64)  # batch statistics need two samples
    for place, (name, layer) in enumerate(model.named_children(), start=1):
        with torch.no_grad():
            x = layer(x)
        weights = sum(tensor.nbytes for tensor in layer.state_dict().values())
        forward, rectified = (0.01, 0.03), place in RECTIFIED
        layer_profile = LayerProfile(name, forward, (0.02, 0.06), x[0].nbytes, weights, rectified=rectified)
        layers.append(replace(layer_profile, shares=_SHARES))
    # Encoding a chunk takes long enough that faults often meet messages that are only partly encoded.
    coding = {name: CodingTimes(encode_s=0.03, decode_s=0.002) for name in encodings.EXACT[1:]}
    coding["changes"] = CodingTimes()
    network = ("simulated", "float64", (1, BATCH), tuple(layers))
    return Profile(*network, load_s=0.005, pack_s=0.02, install_s=0.02, coding=coding, changes_share=0.5)
