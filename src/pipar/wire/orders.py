"""What the server tells a device when it joins or is to go on by another plan, and what the device brings back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipar.config import LARGEST_SCALE, LEAST_SCALE
from pipar.errors import ProtocolError
from pipar.methods import Plan
from pipar.wire import encodings
from pipar.wire.messages import Body, Message, json_body, read_json


@dataclass(frozen=True)
class Orders:
    """All that a device has to know of the training: the content of WELCOME."""

    session: int
    plan: Plan
    layers: int
    batch_size: int
    batch_statistics: bool
    keep_momentum: bool
    proximal: float = 0.0  # the weight mu of FedProx's term; 0 without one
    #: Over a slower link than this, models travel as what has changed in them; 0: always whole.
    changes_below_bps: float = 0.0
    #: C and sigma: what a round has changed is clipped to C, and covered with noise of sigma C; sigma 0: neither.
    clip: float = 1.0
    noise_multiplier: float = 0.0
    #: The largest mu^2 that the training's target allows; 0 without a target.
    budget: float = 0.0
    #: What the server has seen of this device's updates: how many, and the mu^2 that they add up to.
    releases: int = 0
    spent: float = 0.0

    def to_body(self) -> Body:
        rest = {key: value for key, value in self.__dict__.items() if key != "plan"}
        return json_body({**rest, **asdict(self.plan)})

    @classmethod
    def read(cls, message: Message) -> Orders:
        content = read_json(message)
        if {key: type(value) for key, value in content.items()} != _CONTENT:
            raise ProtocolError("The server's welcome is not what this version of pipar takes.")
        if min(content[key] for key in _COUNTS) < 1 or min(content["window"], content["releases"]) < 0:
            raise ProtocolError("The server's welcome has a count below 1.")
        for key, what in _AMOUNTS.items():
            if not (math.isfinite(content[key]) and content[key] >= 0):
                raise ProtocolError(f"The server's welcome has a {what} of {content[key]}, not a number from 0 on.")
        if content["noise_multiplier"] > 0:
            _check_noise(content)
        plan = Plan(**{key: content.pop(key) for key in _PLAN})
        _check_encodings(plan)
        return cls(plan=plan, **content)

    @property
    def keeps_base(self) -> bool:
        """Whether a device keeps the last model that it was sent, so that its changes can be told, or clipped."""
        return self.changes_below_bps > 0 or self.protects

    @property
    def protects(self) -> bool:
        """Whether updates are clipped and covered with noise."""
        return self.noise_multiplier > 0

    def sends_changes(self, rate_bps: float | None) -> bool:
        """Return whether what has changed in a model is there sooner than all of it; None is a link without a limit."""
        return rate_bps is not None and rate_bps < self.changes_below_bps

    def changed_by(self, message: Message) -> Orders:
        """Return the orders with the plan that a PLAN message says."""
        content = read_json(message)
        if {key: type(value) for key, value in content.items()} != _PLAN:
            raise ProtocolError(f"{message} is not a plan that this version of pipar takes.")
        plan = Plan(**content)
        _check_encodings(plan)
        if not 1 <= plan.split_point <= self.layers or plan.micro_batches < 1 or plan.window < 0:
            raise ProtocolError(f"{message} says {plan}, which a network of {self.layers} layers cannot be trained by.")
        return replace(self, plan=plan)


_PLAN = {"split_point": int, "micro_batches": int, "window": int, "up": str, "down": str}
_COUNTS = ("split_point", "micro_batches", "layers", "batch_size")
_AMOUNTS = {
    "proximal": "proximal weight",
    "changes_below_bps": "rate for changes",
    "clip": "norm to clip to",
    "noise_multiplier": "multiplier of noise",
    "budget": "budget",
    "spent": "sum of releases",
}
_CONTENT = {
    **_PLAN,
    **dict.fromkeys(("session", "layers", "batch_size", "releases"), int),
    "batch_statistics": bool,
    "keep_momentum": bool,
    **dict.fromkeys(_AMOUNTS, float),
}


def _check_noise(content: Mapping[str, Any]) -> None:
    if content["keep_momentum"]:
        raise ProtocolError("The server orders noise on updates and momentum that moves with layers, without any.")
    for key in ("clip", "noise_multiplier"):
        if not LEAST_SCALE <= content[key] <= LARGEST_SCALE:
            raise ProtocolError(
                f"The server's welcome has a {_AMOUNTS[key]} of {content[key]:g}, which computes wrong."
            )


def _check_encodings(plan: Plan) -> None:
    for encoding in (plan.up, plan.down):
        if encoding not in encodings.ALL:
            raise ProtocolError(f"The server orders the encoding '{encoding[:40]}', which this version does not have.")


def plan_body(plan: Plan) -> Body:
    """Return the content of PLAN."""
    return json_body(asdict(plan))


@dataclass(frozen=True)
class TrainedPart:
    """A device's trained part, and on how many samples it was trained in this round."""

    device: str
    body: Body
    samples: int
    state: Any = None  # what the body said, if it was decoded when it came; the body is empty then
