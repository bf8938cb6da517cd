"""The training methods: small records over one device program and one server program."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipar.errors import ConfigError, PlanError


@dataclass(frozen=True)
class Method:
    """What distinguishes one way of collaborative training from another."""

    name: str
    title: str
    splits: bool  # False: the device holds the whole network, P = Q
    pipelines: bool  # False: the batch is not cut, N = 1
    shares_server_model: bool  # True: one server-side model for all devices instead of one replica each
    one_device_at_a_time: bool  # True: devices train in turn and hand their weights on


METHODS = {
    method.name: method
    for method in (
        Method("fl", "federated learning", False, False, False, False),
        Method("sl", "split learning", True, False, True, True),
        Method("sfl", "SplitFed V1", True, False, False, False),
        Method("sfl2", "SplitFed V2", True, False, True, False),
        Method("pipar", "PiPar", True, True, False, False),
    )
}


def method(name: str) -> Method:
    """Return the record of a method by its name."""
    if name not in METHODS:
        raise ConfigError(f"'{name}' is not a method; there are {', '.join(METHODS)}.")
    return METHODS[name]


@dataclass(frozen=True, order=True)
class Plan:
    """{P, N} of one device: where its network is cut and into how many micro-batches each batch is.

    `window` limits how many micro-batches' activations the device keeps (1F1B); 0 is all forwards first.
    `up` and `down` are the encodings of activations and of gradients, of `pipar.wire.encodings`.
    """

    split_point: int
    micro_batches: int
    window: int = 0
    up: str = "raw"
    down: str = "raw"

    @property
    def encoding(self) -> str:
        """Both encodings in words: "planes", or "sparse/raw" if they differ."""
        return self.up if self.up == self.down else f"{self.up}/{self.down}"

    def __str__(self) -> str:
        window = f" 1f1b({self.window})" if self.window else ""
        coded = "" if self.encoding == "raw" else f" {self.encoding}"
        return f"P={self.split_point} N={self.micro_batches}{window}{coded}"

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan that prints as this."""
        match = _PLAN.fullmatch(text)
        if match is None:
            raise PlanError(f"'{text}' is not a plan, such as 'P=2 N=3 planes'.")
        up, _, down = (match["coded"] or "raw").partition("/")
        return cls(int(match["p"]), int(match["n"]), int(match["window"] or 0), up, down or up)


_PLAN = re.compile(r"P=(?P<p>\d+) N=(?P<n>\d+)(?: 1f1b\((?P<window>\d+)\))?(?: (?P<coded>\S+))?")


def check_plan(plan: Plan, *, layers: int, batch_size: int, model: str) -> Plan:
    """Return the plan if the model has that split point and the batch that many samples."""
    if not 1 <= plan.split_point <= layers:
        raise PlanError(
            f"Split point {plan.split_point} is outside 1..{layers}: {model} has {layers} layers. "
            "For plain federated learning use --method fl."
        )
    if not 1 <= plan.micro_batches <= batch_size:
        raise PlanError(
            f"{plan.micro_batches} micro-batches are outside 1..{batch_size}: a batch has {batch_size} samples. "
            "Give fewer micro-batches or a larger run.batch_size."
        )
    return plan


def plans_as_json(plans: Mapping[str, Plan]) -> list[dict[str, Any]]:
    """Return the devices' plans as result files and `pipar plan --json` have them."""
    return [{"device": name, **asdict(plan)} for name, plan in sorted(plans.items())]
