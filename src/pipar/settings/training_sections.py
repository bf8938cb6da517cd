"""The sections [task] and [optimizer] of the configuration: what is minimised, and how."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pipar.settings import values
from pipar.settings.optimizers import COMMON, OPTIMIZERS, OWN, check_arguments, known_optimizer, state_copies
from pipar.settings.schedules import SCHEDULES, Schedule, check_schedule, known_schedule
from pipar.settings.values import CLASS_LOSSES, Decay, Fraction, Momentum, NotNegative


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _fingerprint(content: Any, default: Any) -> int:
    """Return a number that differs with the content; 0 for the default one."""
    text, usual = (json.dumps(one, sort_keys=True, default=str) for one in (content, default))
    return 0 if text == usual else zlib.crc32(text.encode())


class TaskSection(Section):
    loss: Annotated[str, BeforeValidator(values.loss)] = "cross_entropy"
    class_weights: Annotated[tuple[float, ...] | None, BeforeValidator(values.weights)] = None
    label_smoothing: Annotated[float, BeforeValidator(values.refuse_bool), Field(ge=0, lt=1)] = 0.0
    ignore_index: Annotated[int, BeforeValidator(values.refuse_bool), Field(ge=-(2**31), lt=2**31)] = -100  # ignored
    count: str | None = None  # of a user's own loss: a function that returns the count of a batch's targets
    metrics: Annotated[tuple[str, ...], BeforeValidator(values.metrics)] = ()  # of validation and test

    @property
    def is_own(self) -> bool:
        """Whether the loss is a user's function."""
        return ":" in self.loss

    @property
    def takes_classes(self) -> bool:
        """Whether targets are numbers of classes."""
        return self.loss in CLASS_LOSSES

    @property
    def trained(self) -> dict[str, Any]:
        """The settings of what is minimised: all but the metrics."""
        return self.model_dump(mode="json", exclude={"metrics"})

    @property
    def fingerprint(self) -> int:
        """A number that differs with the settings that both sides need alike; 0 for the default ones."""
        return _fingerprint(self.trained, TaskSection().trained)

    @model_validator(mode="after")
    def _fits_loss(self) -> TaskSection:
        for key, losses in _LOSSES_WITH.items():
            if getattr(self, key) != type(self).model_fields[key].default and self.loss not in losses:
                raise ValueError(
                    f"task.{key} is for the loss {' and '.join(losses)}, but task.loss is '{self.loss}': leave it out"
                )
        if self.count is not None and not self.is_own:
            raise ValueError(
                f"task.count is for a loss of your own, but task.loss is '{self.loss}', which has its own count: "
                "leave it out"
            )
        return self


#: The losses that have a setting of their own.
_LOSSES_WITH = {
    "class_weights": CLASS_LOSSES,
    "label_smoothing": ("cross_entropy", "next_token"),
    "ignore_index": CLASS_LOSSES,
}


class GroupSection(Section):
    """Parameters with their own settings: the optimiser's arguments, under their names in torch."""

    model_config = ConfigDict(frozen=True, extra="allow")

    match: tuple[str, ...] = Field(min_length=1)  # patterns of names

    @property
    def given(self) -> dict[str, Any]:
        """The settings as they are written."""
        return dict(self.model_extra or {})

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as torch takes them."""
        return {"lr" if key == "learning_rate" else key: _for_torch(value) for key, value in self.given.items()}


def _for_torch(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _with_floats(value: Any) -> Any:
    """Return a tree whose whole numbers are floats, so that 0 and 0.0 are the same."""
    if isinstance(value, Mapping):
        return {key: _with_floats(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_floats(one) for one in value]
    return float(value) if type(value) is int else value


def _parameter_groups(value: Any) -> Any:
    are_groups = isinstance(value, list | tuple) and all(isinstance(one, Mapping | GroupSection) for one in value)
    if not are_groups or not all(isinstance(one, GroupSection) or _has_patterns(one) for one in value):
        raise ValueError(
            'is not allowed: write [[optimizer.groups]] with match = ["head.*"] and the settings of these parameters'
        )
    return value


def _has_patterns(group: Mapping[str, Any]) -> bool:
    patterns = group.get("match")
    return isinstance(patterns, list | tuple) and bool(patterns) and all(isinstance(one, str) for one in patterns)


def _scheduling(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError("is not allowed: write [optimizer.scheduling] with the schedule's parameters below it")
    return value


class OptimizerSection(Section):
    """An optimiser; in addition to these keys, it takes the arguments of its class, under their names in torch."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: Annotated[str, BeforeValidator(known_optimizer)] = "sgd"
    factory: str | None = None  # "name" and all arguments are then its own
    learning_rate: Fraction | None = 0.01  # where it is not given, that of the optimiser
    momentum: Momentum | None = 0.9
    weight_decay: Decay | None = 0.0
    decay_norms_and_biases: bool = True
    groups: Annotated[tuple[GroupSection, ...], BeforeValidator(_parameter_groups)] = ()
    schedule: Annotated[str, BeforeValidator(known_schedule)] = "constant"
    warmup: NotNegative = 0  # steps
    scheduling: Annotated[dict[str, Any], BeforeValidator(_scheduling)] = Field(default_factory=dict)
    clip_norm: Fraction | None = None  # the largest norm of a gradient
    clip: Literal["global", "side"] = "global"  # by the norm of the whole network's gradient, or of each side's
    state_at_aggregation: Literal["reset", "keep"] = "reset"
    momentum_at_aggregation: Literal["reset", "keep"] | None = None  # the former name

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments that are known, as torch takes them; the learning rate is not among them."""
        common = {key: value for key in COMMON if (value := getattr(self, key)) is not None}
        return common | {key: _for_torch(value) for key, value in (self.model_extra or {}).items()}

    @property
    def learning_schedule(self) -> Schedule:
        """How the learning rate changes."""
        return Schedule(self.schedule, self.scheduling, self.warmup)

    @property
    def clips_across(self) -> bool:
        """Whether gradients are clipped by one norm over both sides of the cut."""
        return self.clip_norm is not None and self.clip == "global"

    @property
    def clips_by_side(self) -> bool:
        """Whether each side of the cut clips its gradients by their own norm."""
        return self.clip_norm is not None and self.clip == "side"

    @property
    def fingerprint(self) -> int:
        """A number that differs with the settings that both sides need alike; 0 for the default ones.

        The learning rate is not among them: a device gets it from its server.
        """
        return _fingerprint(self._needed_alike(), OptimizerSection()._needed_alike())

    def _needed_alike(self) -> Any:
        """Return the settings with all defaults, so that it does not matter whether one of those was written."""
        own = OPTIMIZERS[self.name].arguments if self.factory is None else {}
        content = {
            "optimizer": self.factory or self.name,
            "arguments": {**own, **self.arguments},
            "groups": [[group.match, group.settings] for group in self.groups],
            "decay_norms_and_biases": self.decay_norms_and_biases,
            "schedule": [self.schedule, {**SCHEDULES.get(self.schedule, {}), **self.scheduling}, self.warmup],
            "clip": None if self.clip_norm is None else [self.clip, self.clip_norm],
        }
        return _with_floats(content)

    @property
    def kind(self) -> str:
        """The name of the optimiser; "own" for a user's."""
        return self.name if self.factory is None else OWN

    @property
    def state_copies(self) -> float:
        """How many values it keeps for each weight; of a user's own, a guess."""
        return state_copies(self.kind, self.arguments, cycles_momentum=self.learning_schedule.cycles_momentum)

    @model_validator(mode="after")
    def _complete(self) -> OptimizerSection:
        given = self._given()
        if self.factory is not None:
            _refuse_with_factory(given, self.model_fields_set)
        else:
            check_arguments(self.name, {key: value for key, value in given.items() if key != "learning_rate"})
        known = OPTIMIZERS[self.name]
        defaults = {"learning_rate": known.learning_rate} | {key: known.arguments.get(key) for key in COMMON}
        # Not through the constructor: what was given has to stay distinct from what was not, for `--set`.
        for key in defaults.keys() - given.keys():
            self.__dict__[key] = None if self.factory is not None else defaults[key]
        return self

    def _given(self) -> dict[str, Any]:
        """Return the arguments of the optimiser that were given; a key without a value counts as not given."""
        common = {key: getattr(self, key) for key in ("learning_rate", *COMMON) if key in self.model_fields_set}
        return {key: value for key, value in common.items() if value is not None} | (self.model_extra or {})

    @model_validator(mode="after")
    def _groups_fit(self) -> OptimizerSection:
        if self.factory is not None and (self.groups or not self.decay_norms_and_biases):
            key = "groups" if self.groups else "decay_norms_and_biases"
            raise ValueError(
                f"optimizer.{key} is given with a function that makes groups of its own (optimizer.factory, or "
                "optimizer= in Python): give only one of them"
            )
        for group in self.groups:
            rate = group.given.get("learning_rate", 0.01)
            if type(rate) not in (int, float) or not 0 < rate < math.inf:
                raise ValueError(f"optimizer.groups has learning_rate = {rate!r}: it should be a number above 0")
            check_arguments(self.name, {key: one for key, one in group.given.items() if key != "learning_rate"})
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> OptimizerSection:
        check_schedule(self.schedule, self.scheduling)
        if (
            self.learning_schedule.cycles_momentum
            and self.factory is None
            and not {"momentum", "betas"} & OPTIMIZERS[self.name].arguments.keys()
        ):
            raise ValueError(
                f"optimizer.schedule = 'onecycle' also changes momentum or betas, and {self.name} has neither: set "
                "optimizer.scheduling.cycle_momentum = false"
            )
        return self

    @model_validator(mode="after")
    def _former_name(self) -> OptimizerSection:
        kept, now = self.momentum_at_aggregation, self.state_at_aggregation
        if kept is None:
            return self
        if "state_at_aggregation" in self.model_fields_set and kept != now:
            raise ValueError(
                f"optimizer.momentum_at_aggregation = '{kept}' is the former name of optimizer.state_at_aggregation, "
                f"which is '{now}': give only the latter"
            )
        self.__dict__.update(state_at_aggregation=kept, momentum_at_aggregation=None)
        self.model_fields_set.add("state_at_aggregation")
        return self


def _refuse_with_factory(given: Mapping[str, Any], keys: set[str]) -> None:
    extra = next((key for key in (*given, "name") if key in given or key in keys), None)
    if extra is not None:
        raise ValueError(
            f"optimizer.{extra} is given with a function that makes the optimiser with all of its arguments "
            "(optimizer.factory, or optimizer= in Python): give only one of them"
        )
