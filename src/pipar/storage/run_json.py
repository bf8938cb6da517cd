"""What the JSON files of a run contain: rows by epoch, plans, and only numbers that JSON has."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipar.events import Replanned
from pipar.methods import Plan


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl or rounds.jsonl, without a last one that is still being written."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("epoch"), int)]


def plan_from_json(entry: Mapping[str, Any]) -> Plan:
    """Return the plan of an entry of `plans`; fields that an older result lacks have their defaults."""
    return Plan(**{one.name: entry[one.name] for one in fields(Plan) if one.name in entry})


def replan_as_json(event: Replanned) -> dict[str, Any]:
    """Return new plans as result.json has them."""
    plans = [{"device": name, **plan} for name, plan in sorted(event.plans.items())]
    return {"epoch": event.epoch, "plans": plans, "reason": event.reason}


def strict_json(value: Any) -> Any:
    """Return the value with null for infinite numbers and NaN, which JSON lacks: a diverged loss is one of them."""
    if isinstance(value, dict):
        return {key: strict_json(one) for key, one in value.items()}
    if isinstance(value, list):
        return [strict_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
