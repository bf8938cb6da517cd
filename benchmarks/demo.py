"""The numbers of `make demo`: the same training with fl, sfl and pipar, in real processes on an emulated 4G link."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.record import Claim, pipar

METHODS = ("fl", "sfl", "pipar")
DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    results = pipar(["compare", str(DEMO), f"--methods={','.join(METHODS)}"], folder)
    rows = {result["method"]: _row(result) for result in results}
    claims = [
        Claim(
            f"epoch with {method} / with pipar, make demo", rows[method]["epoch_s"] / rows["pipar"]["epoch_s"], "x", 1
        )
        for method in ("fl", "sfl")
    ]
    return claims, {"rows": rows}


def _row(result: dict[str, Any]) -> dict[str, Any]:
    epochs, plan = result["epochs"], result["plans"][0]
    encoding = plan["up"] if plan["up"] == plan["down"] else f"{plan['up']}/{plan['down']}"
    return {
        "plan": f"P={plan['split_point']} N={plan['micro_batches']}" + ("" if encoding == "raw" else f" {encoding}"),
        "epoch_s": mean(epoch["seconds"] for epoch in epochs),
        "server_idle_s": mean(epoch["server_idle_s"] for epoch in epochs),
        "device_idle_s": mean(epoch["device_idle_s"] for epoch in epochs),
        "test_accuracy": result["test_accuracy"],
        "megabytes": mean(epoch["bytes_up"] + epoch["bytes_down"] for epoch in epochs) / 1e6,
    }
