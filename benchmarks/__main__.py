"""Run all measurements, or the named ones; exit 1 if a claim does not hold."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    agreement,
    any_network,
    automatic_cuts,
    bare_loop,
    codec,
    coded_epochs,
    cores,
    dashboard,
    demo,
    deployment,
    efficiency,
    exact_wire,
    examples,
    frozen,
    hostility,
    large_model,
    long_run,
    lossy,
    many_devices,
    prediction,
    preparing,
    privacy,
    record,
    recorder,
    replanning,
    reproduction,
    sampled_fleets,
    sampling,
    scale,
    selection,
    shaping,
    soak,
    startup,
    timeouts,
)

BENCHMARKS: dict[str, Callable[[Path], tuple[list[record.Claim], dict[str, object]]]] = {
    "demo": demo.measure,
    "shaping": shaping.measure,
    "efficiency": efficiency.measure,
    "agreement": agreement.measure,
    "codec": codec.measure,
    "bare_loop": bare_loop.measure,
    "scale": scale.measure,
    "selection": selection.measure,
    "prediction": prediction.measure,
    "replanning": replanning.measure,
    "large_model": large_model.measure,
    "many_devices": many_devices.measure,
    "sampling": sampling.measure,
    "sampled_fleets": sampled_fleets.measure,
    "exact_wire": exact_wire.measure,
    "coded_epochs": coded_epochs.measure,
    "lossy": lossy.measure,
    "frozen": frozen.measure,
    "preparing": preparing.measure,
    "automatic_cuts": automatic_cuts.measure,
    "dashboard": dashboard.measure,
    "hostility": hostility.measure,
    "recorder": recorder.measure,
    "privacy": privacy.measure,
    "timeouts": timeouts.measure,
    "reproduction": reproduction.measure,
    "reproduction_full": reproduction.measure_full,
    "long_run": long_run.measure,
    "virtual_soak": soak.measure_virtual,
    "soak": soak.measure,
    "any_network": any_network.measure,
    "examples": examples.measure,
    "deployment": deployment.measure,
    "startup": startup.measure,
    "cores": cores.measure,
}
#: These take long, need packages that are not installed, or have no checked-in result yet: run only if named.
ON_REQUEST = (
    "hostility",
    "reproduction_full",
    "long_run",
    "virtual_soak",
    "soak",
    "any_network",
    "examples",
    "deployment",
    "cores",
)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"'{unknown[0]}' is not a benchmark; there are {', '.join(BENCHMARKS)}.", file=sys.stderr)
        return 2
    failed = 0
    for name in names or [name for name in BENCHMARKS if name not in ON_REQUEST]:
        print(f"{name} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            claims, details = BENCHMARKS[name](Path(folder))
        record.write(name, claims, details)
        for claim in claims:
            print(claim, flush=True)
            failed += not claim.holds
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
