"""Prepare a training once, on one core, and print what it took: `python -m benchmarks.preparing_once SETTING...`.

The network is built once before, because any program with it imports its libraries.
"""

from __future__ import annotations

import json
import os
import sys
import time

from pipar.events import Event, Preparing
from pipar.settings.config_file import load_config


def main() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    from pipar.job.prepare import unplanned_job
    from pipar.job.workload import Workload

    config = load_config(None, sys.argv[1:])
    Workload(config).network()
    imported_s, start_s, started = time.process_time(), time.process_time(), time.monotonic()
    told: list[Preparing] = []

    def observe(event: Event) -> None:
        if isinstance(event, Preparing):
            told.append(event)

    job = unplanned_job(Workload(config), observe)
    record = {
        "imports_cpu_s": imported_s,
        "cpu_s": time.process_time() - start_s,
        "seconds": time.monotonic() - started,
        "layers": len(job.server_profile.layers),
        "told": len(told),
        "what": list(dict.fromkeys(event.what for event in told)),
    }
    sys.stdout.write(json.dumps(record))


main()
