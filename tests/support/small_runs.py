"""Timing-only runs that take no time: three boards of a known machine."""

SETTINGS = (
    "run.epochs=2",
    "data.samples_per_device=350",
    "devices.count=3",
    'devices.profile="raspberry-pi-3b"',
    'devices.link={up = "10Mbit/s", down = "25Mbit/s", latency = "3ms"}',
    'server.profile="i7-11850h"',
    "server.cores=2",
)
