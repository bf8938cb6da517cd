"""The process that searches for plans during a training, at the lowest priority: a search must not slow it down.

It reads the questions of `background_search.SearchProcess` from its standard input: a length, then a pickled fleet, the
current plans and the settings. It answers each with one line of JSON on its standard output.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from dataclasses import astuple
from typing import BinaryIO

from pipar.errors import PlanError
from pipar.planner.background_search import LENGTH, NewPlans, search_again


def answer(questions: BinaryIO) -> bool:
    """Answer the next question on the standard output; return False if there is none."""
    head = questions.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return False
    fleet, start, settings = pickle.loads(questions.read(*LENGTH.unpack(head)))  # noqa: S301 - from the parent's own pipe
    before, problem, found = time.process_time(), "", NewPlans({})
    try:
        found = search_again(fleet, start, settings)
    except Exception as error:  # noqa: BLE001 - the question ends here, and its answer says what went wrong
        problem = str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
    plans = {name: astuple(plan) for name, plan in found.items()}
    about = {"gain": found.gain, "is_measured": found.is_measured, "problem": problem}
    print(json.dumps({"plans": plans, **about, "cpu_s": time.process_time() - before}), flush=True)
    return True


def main() -> None:
    """Answer questions until the standard input ends, or the process that asks is gone."""
    try:
        while answer(sys.stdin.buffer):
            pass
    except BrokenPipeError:
        os._exit(0)
