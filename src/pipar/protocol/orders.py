"""What the server tells a device when it joins or is to go on by another plan, and what the device brings back."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from pipar.errors import ProtocolError
from pipar.methods import Plan
from pipar.protocol.messages import Body, Message, json_body, read_json


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

    def to_body(self) -> Body:
        rest = {key: value for key, value in self.__dict__.items() if key != "plan"}
        return json_body({**rest, **asdict(self.plan)})

    @classmethod
    def read(cls, message: Message) -> Orders:
        content = read_json(message)
        if {key: type(value) for key, value in content.items()} != _CONTENT:
            raise ProtocolError("The server's welcome is not what this version of pipar takes.")
        if min(content[key] for key in _COUNTS) < 1 or content["window"] < 0:
            raise ProtocolError("The server's welcome has a count below 1.")
        proximal = content["proximal"]
        if not (math.isfinite(proximal) and proximal >= 0):
            raise ProtocolError(f"The server's welcome has a proximal weight of {proximal}, not a number from 0 on.")
        plan = Plan(content.pop("split_point"), content.pop("micro_batches"), content.pop("window"))
        return cls(plan=plan, **content)

    def changed_by(self, message: Message) -> Orders:
        """Return the orders with the plan that a PLAN message says."""
        content = read_json(message)
        if {key: type(value) for key, value in content.items()} != dict.fromkeys(_PLAN, int):
            raise ProtocolError(f"{message} is not a plan that this version of pipar takes.")
        plan = Plan(**content)
        if not 1 <= plan.split_point <= self.layers or plan.micro_batches < 1 or plan.window < 0:
            raise ProtocolError(f"{message} says {plan}, which a network of {self.layers} layers cannot be trained by.")
        return replace(self, plan=plan)


_PLAN = ("split_point", "micro_batches", "window")
_COUNTS = ("split_point", "micro_batches", "layers", "batch_size")
_CONTENT = {
    **dict.fromkeys((*_COUNTS, "session", "window"), int),
    "batch_statistics": bool,
    "keep_momentum": bool,
    "proximal": float,
}


def plan_body(plan: Plan) -> Body:
    """Return the content of PLAN."""
    return json_body(asdict(plan))


@dataclass(frozen=True)
class Returned:
    """A device's trained part, and on how many samples it was trained in this round."""

    device: str
    body: Body
    samples: int
