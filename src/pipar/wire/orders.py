"""What the server tells a device when it joins or gets a new plan, and the trained part that the device returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipar.errors import ProtocolError
from pipar.json_records import is_number
from pipar.methods import Plan
from pipar.settings.config import LARGEST_SCALE, LEAST_SCALE
from pipar.settings.values import LARGEST_BATCH, MOST_EPOCHS, MOST_LOCAL_EPOCHS
from pipar.wire import encodings
from pipar.wire.messages import Body, Message, json_body, read_json


@dataclass(frozen=True)
class Orders:
    """Everything that a device has to know about the training: the content of WELCOME."""

    session: int
    plan: Plan
    layers: int
    batch_size: int
    batch_statistics: bool
    keep_state: bool
    proximal: float = 0.0  # the weight mu of FedProx's term; 0 without one
    #: Over a link slower than this, models are sent as their changes; 0: always whole.
    changes_below_bps: float = 0.0
    #: C and sigma: the update of a round is clipped to C and gets noise of sigma C; sigma 0: neither.
    clip: float = 1.0
    noise_multiplier: float = 0.0
    #: The largest mu^2 that the training's target epsilon allows; 0 without a target.
    budget: float = 0.0
    #: The updates of this device that the server knows of: their number, and the mu^2 that they add up to.
    releases: int = 0
    spent: float = 0.0
    #: The first layers that have nothing to train: a device with only these sends activations and gets no gradients.
    frozen_layers: int = 0
    #: Of these, those that compute each sample by itself: its activations are the same in every epoch.
    steady_layers: int = 0
    #: The rounds of the whole training, if the schedule of the optimiser depends on them; else 0.
    epochs: int = 0
    #: 1 if both sides tell each other the norms of their gradients, to clip them together.
    norms: int = 0
    #: A number that differs with the settings of the optimiser; 0 for the default ones.
    optimizer: int = 0
    #: 0 for an optimiser of the user's own, which has its own.
    learning_rate: float = 0.01
    #: Passes over its samples before the device returns its part.
    local_epochs: int = 1
    #: A number that differs with what is minimised; 0 for the default.
    task: int = 0

    def to_body(self) -> Body:
        rest = {key: value for key, value in self.__dict__.items() if key != "plan" and _RARE.get(key) != value}
        return json_body({**rest, **asdict(self.plan)})

    @classmethod
    def read(cls, message: Message) -> Orders:
        content = {**_RARE, **read_json(message)}
        if {key: type(value) for key, value in content.items()} != _CONTENT:
            raise ProtocolError(
                "The server's welcome does not have the fields of this pipar version: install the same pipar on both; "
                "'pipar --version' shows what is installed."
            )
        for key, least in _LEAST.items():
            if content[key] < least:
                raise ProtocolError(f"The server's welcome has {key} = {content[key]}; it has to be at least {least}.")
        for key, most in _MOST.items():
            if content[key] > most:
                raise ProtocolError(f"The server's welcome has {key} above {most}; it has to be at most that.")
        for key, what in _AMOUNTS.items():
            if not is_number(content[key], 0.0, _LARGEST_AMOUNT):
                raise ProtocolError(
                    f"The server's welcome has a {what} of {content[key]}; it has to be a finite number of at least 0."
                )
        if content["noise_multiplier"] > 0:
            _check_noise(content)
        plan = Plan(**{key: content.pop(key) for key in _PLAN})
        _check_plan(plan, content["layers"], "The server's welcome")
        return cls(plan=plan, **content)

    def passes(self, epoch: int) -> range:
        """Return the numbers of the passes over the device's samples in an epoch, counted over the whole training."""
        return range((epoch - 1) * self.local_epochs + 1, epoch * self.local_epochs + 1)

    @property
    def keeps_base(self) -> bool:
        """Whether a device keeps the last model that it received, to send its changes or to clip them."""
        return self.changes_below_bps > 0 or self.protects

    @property
    def trains_part(self) -> bool:
        """Whether the device's part has anything to train."""
        return self.plan.split_point > self.frozen_layers

    @property
    def exchanges_norms(self) -> bool:
        """Whether the norms of gradients are exchanged after each batch: not if all that is trained is on one side."""
        return self.norms == 1 and self.trains_part and self.plan.split_point < self.layers

    @property
    def is_steady(self) -> bool:
        """Whether the device's part gives the same activations in every epoch; it computes each sample by itself."""
        return self.plan.split_point <= self.steady_layers and self.plan.split_point < self.layers

    @property
    def keeps_activations(self) -> bool:
        """Whether the server can keep the device's activations; the error of a lossy encoding differs every time."""
        return self.is_steady and self.plan.up not in encodings.LOSSY

    @property
    def protects(self) -> bool:
        """Whether updates are clipped and get noise."""
        return self.noise_multiplier > 0

    def sends_changes(self, rate_bps: float | None) -> bool:
        """Return whether a model arrives sooner as its changes than whole; None is a link without a limit."""
        return rate_bps is not None and rate_bps < self.changes_below_bps

    def changed_by(self, message: Message) -> Orders:
        """Return the orders with the plan of a PLAN message."""
        content = read_json(message)
        if {key: type(value) for key, value in content.items()} != _PLAN:
            raise ProtocolError(f"{message} does not have the fields of a plan of this version of pipar.")
        plan = Plan(**content)
        _check_plan(plan, self.layers, str(message))
        return replace(self, plan=plan)


#: Fields that most trainings leave at these values are left out then.
_RARE_COUNTS = {
    "frozen_layers": 0,
    "steady_layers": 0,
    "epochs": 0,
    "norms": 0,
    "optimizer": 0,
    "local_epochs": 1,
    "task": 0,
}
_RARE = {**_RARE_COUNTS, "learning_rate": 0.01}
_PLAN = {"split_point": int, "micro_batches": int, "window": int, "up": str, "down": str}
_LEAST = {
    "split_point": 1,
    "micro_batches": 1,
    "layers": 1,
    "batch_size": 1,
    "window": 0,
    "releases": 0,
    "session": 1,
    **_RARE_COUNTS,
}
#: The header has 32 bits for a session; the other numbers are above every honest one.
_MOST = {
    "session": 2**32 - 1,
    "layers": 100_000,
    "batch_size": LARGEST_BATCH,
    "releases": 2**53,
    "frozen_layers": 100_000,
    "steady_layers": 100_000,
    "epochs": MOST_EPOCHS,
    "local_epochs": MOST_LOCAL_EPOCHS,
    "norms": 1,
    "optimizer": 2**32 - 1,
    "task": 2**32 - 1,
}
#: Sums of these stay finite.
_LARGEST_AMOUNT = 1e300
_AMOUNTS = {
    "proximal": "proximal weight",
    "changes_below_bps": "rate for changes",
    "clip": "clipping norm",
    "noise_multiplier": "noise multiplier",
    "budget": "budget",
    "spent": "sum of mu^2",
    "learning_rate": "learning rate",
}
_CONTENT = {
    **_PLAN,
    **dict.fromkeys(("session", "layers", "batch_size", "releases", *_RARE_COUNTS), int),
    "batch_statistics": bool,
    "keep_state": bool,
    **dict.fromkeys(_AMOUNTS, float),
}


def _check_noise(content: Mapping[str, Any]) -> None:
    if content["keep_state"]:
        raise ProtocolError(
            "The server orders noise on updates and optimiser state that moves with layers; it would be sent without "
            "noise."
        )
    for key in ("clip", "noise_multiplier"):
        if not LEAST_SCALE <= content[key] <= LARGEST_SCALE:
            raise ProtocolError(
                f"The server's welcome has a {_AMOUNTS[key]} of {content[key]:g}; it has to be from {LEAST_SCALE:g} to "
                f"{LARGEST_SCALE:g}."
            )


def _check_plan(plan: Plan, layers: int, where: str) -> None:
    in_batch = 1 <= plan.micro_batches <= LARGEST_BATCH and 0 <= plan.window <= LARGEST_BATCH
    if not 1 <= plan.split_point <= layers or not in_batch:
        raise ProtocolError(
            f"{where} has the plan {str(plan)[:100]}, which does not fit a network of {layers} layers and batches of "
            f"at most {LARGEST_BATCH} samples."
        )
    for encoding in (plan.up, plan.down):
        if encoding not in encodings.ALL:
            raise ProtocolError(
                f"The server orders the encoding '{encoding[:40]}', which this version of pipar does not have."
            )


def plan_body(plan: Plan) -> Body:
    """Return the content of PLAN."""
    return json_body(asdict(plan))


@dataclass(frozen=True)
class TrainedPart:
    """A device's trained part, and on how many samples it was trained in this round."""

    device: str
    body: Body
    samples: int
    state: Any = None  # the decoded body, if it was decoded on arrival; the body is empty then
