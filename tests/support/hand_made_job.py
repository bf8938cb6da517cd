"""A job of two devices whose profile is made by hand, for tests of what is written about a run."""

from __future__ import annotations

from pipar.job.job import Job
from pipar.methods import Plan
from pipar.profiling.profile import LayerProfile, Profile
from pipar.settings.config import device_specs
from pipar.settings.config_file import config_from

CONFIG = config_from(
    {
        "run": {"method": "pipar", "epochs": 2, "batch_size": 10, "seed": 7},
        "plan": {"split_point": 1, "micro_batches": 2},
        "devices": [{"name": "pi", "count": 2, "link": {"up": "1Mbit/s", "down": "2.5Mbit/s", "latency": "20ms"}}],
    }
)


def job() -> Job:
    """Return the job."""
    layers = tuple(LayerProfile(name, (1.0,), (2.0,), 8, 16) for name in ("one", "two"))
    profile = Profile("hand", "float32", (10,), layers)
    specs = ("pi-1", "pi-2")
    profiles = dict.fromkeys(specs, profile)
    return Job(
        config=CONFIG,
        specs=device_specs(CONFIG),
        sizes=dict.fromkeys(specs, 20),
        server_profile=profile,
        device_profiles=profiles,
        batch_statistics=False,
        dropout=False,
        plans=dict.fromkeys(specs, Plan(1, 2)),
        dataset="digits",
        model="vgg5",
    )
