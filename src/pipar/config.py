"""The configuration: TOML sections as frozen records, every key with a default; an error is one sentence."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pipar.aggregator_settings import all_parameters, check_devices, check_method, known_aggregator
from pipar.errors import ConfigError, InputError
from pipar.learning_schedules import SCHEDULES, Schedule, check_schedule, known_schedule
from pipar.links import Link, parse_link
from pipar.methods import METHODS
from pipar.metric_settings import VAL_LOSS, check_names
from pipar.optimizer_settings import COMMON, OPTIMIZERS, OWN, check_arguments, known_optimizer, state_copies
from pipar.units import parse_duration, parse_size, split_address

MODELS = ("vgg5", "resnet18", "mobilenetv3_small", "vgg16", "resnet101", "mobilenetv3_large")
DATASETS = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "tiny_imagenet", "synthetic")
TRACKERS = ("tensorboard", "mlflow", "wandb")
#: Losses of numbers of classes, and of each number of the output.
CLASS_LOSSES = ("cross_entropy", "nll", "next_token")
ELEMENT_LOSSES = ("mse", "l1", "smooth_l1", "bce")
#: More frequent pings would drain a phone's battery and show little more.
_LEAST_KEEPALIVE_S = 1.0
#: The most samples of a batch, and the most devices of a group.
LARGEST_BATCH = 1_000_000
#: The most rounds of a training.
MOST_EPOCHS = 1_000_000_000
#: The most passes over a device's samples in one round.
MOST_LOCAL_EPOCHS = 100_000


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _refuse_bool(value: Any) -> Any:
    # TOML's true would pass for the number 1.
    if isinstance(value, bool):
        raise ValueError("is not a number")
    return value


def _plan_number(value: Any) -> Any:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError("is neither 'auto' nor a whole number")
    if value != "auto" and value < 1:
        raise ValueError("is less than 1; give a whole number from 1 on, or 'auto'")
    return value


def _drawn(value: Any) -> Any:
    """Return "all", a number of devices, or a share of them."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    is_share = isinstance(value, float) and 0 < value <= 1
    if value != "all" and not is_count and not is_share:
        raise ValueError("is not allowed: give 'all', a number of devices from 1 on, or a share above 0 and up to 1.0")
    return value


def _shape(value: Any) -> Any:
    sides = list(value) if isinstance(value, list | tuple) else []
    if not sides or not all(isinstance(side, int) and not isinstance(side, bool) and side >= 1 for side in sides):
        raise ValueError("is not the shape of a sample; write its sides, as in [3, 32, 32]")
    return value


def _sizes(value: Any) -> Any:
    sizes = value if isinstance(value, list | tuple) else [value]
    if value is not None and not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in sizes):
        raise ValueError("is neither a whole number from 1 on nor a list of them, one for each device")
    return value


def _size(value: Any) -> Any:
    """Return a size in bytes, at least 1."""
    if value is None:
        return None
    try:
        size = 0 if isinstance(value, bool) else parse_size(value)
    except (ConfigError, ValueError, OverflowError):  # TOML also has inf and nan
        size = 0
    if size < 1:
        raise ValueError('is not an amount of memory; write a size above 0, as in "1GiB" or "800MB"')
    return size


def _cache_size(value: Any) -> Any:
    """Return a size in bytes; "off" is 0."""
    return 0 if value in ("off", 0) and value is not False else _size(value)


def _duration(value: Any, or_: str = "") -> Any:
    """Return a duration in seconds, at least 0; an error also names the words that are allowed instead."""
    if value is None:
        return None
    try:
        seconds = -1.0 if isinstance(value, bool) else parse_duration(value)
    except (ConfigError, ValueError, OverflowError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        words = f", or {or_}" if or_ else ""
        raise ValueError(f'is not a duration; write a number with its unit, as in "30s" or "500ms"{words}')
    return seconds


def _chosen_duration(value: Any) -> Any:
    """Return a duration in seconds, or "auto"."""
    return value if value == "auto" else _duration(value, or_="auto")


def _deadline(value: Any) -> Any:
    """Return a duration in seconds, "auto", or "off", which is also what None means."""
    if value is None or value == "off":
        return "off"
    return value if value == "auto" else _duration(value, or_="auto or off")


def _keepalive(value: Any) -> Any:
    seconds = _chosen_duration(value)
    if seconds is None or (seconds != "auto" and seconds < _LEAST_KEEPALIVE_S):
        raise ValueError(
            f"is not allowed: peers are pinged at most every {_LEAST_KEEPALIVE_S:g} s; the default is auto"
        )
    return seconds


def _groups(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(g, Mapping | _Section) for g in value):
        raise ValueError("is not allowed: write [[devices]] with its keys below it, once for each group of devices")
    return value


def _address(value: str) -> str:
    try:
        split_address(value)
    except InputError:
        raise ValueError("is not allowed: write HOST:PORT with a port from 0 to 65535, as in 127.0.0.1:50051") from None
    return value


def _trackers(value: Any) -> Any:
    """Return the names of known trackers, each once."""
    if not isinstance(value, list | tuple):
        raise ValueError(f'is not a list; write the names of trackers, as in ["{TRACKERS[0]}"]')
    unknown = [name for name in value if name not in TRACKERS]
    if unknown:
        raise ValueError(f"names {unknown[0]!r}, which is not a tracker; there are {', '.join(TRACKERS)}")
    return tuple(dict.fromkeys(value))


def _allow(value: Any) -> Any:
    """Return the names of devices, or the path of a file that has them."""
    if value is None or (isinstance(value, str) and value):
        return value
    if not isinstance(value, list | tuple) or not value or not all(isinstance(name, str) and name for name in value):
        raise ValueError(
            'is not allowed: write the names of devices, as in ["pi-1", "pi-2"], or the path of a file with one a line'
        )
    return tuple(dict.fromkeys(value))


def _module_paths(value: Any) -> Any:
    """Return the paths of modules."""
    is_list = isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value)
    if value is not None and not is_list:
        raise ValueError(
            'is not a list of module paths; write them in order of execution, as in ["layer1", "layer2.0"]'
        )
    return value


def _loss(value: Any) -> Any:
    """Return the name of a loss, or "package.module:function"."""
    if value in (*CLASS_LOSSES, *ELEMENT_LOSSES) or (isinstance(value, str) and ":" in value):
        return value
    known = ", ".join((*CLASS_LOSSES, *ELEMENT_LOSSES))
    raise ValueError(f"is not a loss; there are {known}, or write a function of your own as package.module:function")


def _metrics(value: Any) -> Any:
    """Return the names of metrics, each once."""
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError('is not a list of metrics; write their names, as in ["f1", "auroc"]')
    check_names(value)
    return tuple(value)


def _weights(value: Any) -> Any:
    """Return one weight for each class."""
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if value is None or (is_list and all(_is_weight(one) for one in value) and any(value)):
        return value
    raise ValueError("is not a list of weights; write a number from 0 on for each class, as in [1.0, 6.5]")


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _table(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError("is not allowed: write [server.aggregation] with the aggregator's parameters below it")
    for key, parameter in value.items():
        if not isinstance(parameter, bool | int | float | str | list | dict):  # in Python, anything can be given
            raise ValueError(f"has a {type(parameter).__name__} for {key!r}, which a configuration file cannot contain")
    return value


def _named(letters: str) -> Callable[[str], str]:
    """Return a check that a name has only letters, digits and these characters, because it names files and folders."""
    pattern = re.compile(f"[A-Za-z0-9][A-Za-z0-9{re.escape(letters)}]*")

    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            signs = " ".join(letters)
            raise ValueError(f"is not allowed: a name starts with a letter or a digit and has only those and {signs}")
        return value

    return check


Positive = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1)]
#: The most devices, or samples in a batch: more could not be simulated in reasonable time.
UpToAMillion = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1, le=LARGEST_BATCH)]
NotNegative = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(_refuse_bool), Field(gt=0, allow_inf_nan=False)]
Momentum = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, lt=1)]
Decay = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, allow_inf_nan=False)]
Epochs = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1, le=MOST_EPOCHS)]
LocalEpochs = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1, le=MOST_LOCAL_EPOCHS)]
Probability = Annotated[float, BeforeValidator(_refuse_bool), Field(gt=0, lt=1)]
Share = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, le=1)]
PlanNumber = Annotated[Literal["auto"] | int, BeforeValidator(_plan_number)]


class RunSection(_Section):
    name: Annotated[str, AfterValidator(_named("._+-"))] | None = None
    method: Literal["pipar", "fl", "sl", "sfl", "sfl2"] = "pipar"
    epochs: Epochs = 5
    local_epochs: LocalEpochs = 1  # passes over its samples before a device returns its part
    devices_per_round: Annotated[int | float | Literal["all"], BeforeValidator(_drawn)] = "all"  # or a share up to 1
    batch_size: UpToAMillion = 100
    seed: NotNegative = 0
    patience: Positive | None = None
    keep: Literal["best", "last"] = "last"  # the model in model.safetensors
    monitor: str = VAL_LOSS  # what patience and the best model go by; or the name of a metric
    trace: Literal["auto", "full", "sampled", "off"] = "auto"
    trackers: Annotated[tuple[str, ...], BeforeValidator(_trackers)] = ()


class ModelSection(_Section):
    name: Literal[MODELS] = "vgg5"  # type: ignore[valid-type]
    factory: str | None = None
    weights: str | None = None  # a safetensors file to start from
    cut_points: Annotated[tuple[str, ...] | None, BeforeValidator(_module_paths)] = None  # None: every usable cut
    freeze: list[str] = Field(default_factory=list)  # patterns of the names of parameters that are not trained
    norm: Literal["batch", "group", "none"] = "group"
    dtype: Literal["float32", "float64"] = "float32"


def _crc(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, default=str).encode())


class TaskSection(_Section):
    loss: Annotated[str, BeforeValidator(_loss)] = "cross_entropy"
    class_weights: Annotated[tuple[float, ...] | None, BeforeValidator(_weights)] = None
    label_smoothing: Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, lt=1)] = 0.0
    ignore_index: Annotated[int, BeforeValidator(_refuse_bool), Field(ge=-(2**31), lt=2**31)] = -100  # does not count
    count: str | None = None  # of a user's own loss: a function that returns what a batch of targets counts
    metrics: Annotated[tuple[str, ...], BeforeValidator(_metrics)] = ()  # of validation and test

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
        return 0 if self.trained == TaskSection().trained else _crc(self.trained)

    @model_validator(mode="after")
    def _fits_loss(self) -> TaskSection:
        for key, losses in _LOSSES_WITH.items():
            if getattr(self, key) != type(self).model_fields[key].default and self.loss not in losses:
                raise ValueError(
                    f"task.{key} is for the loss {' and '.join(losses)}, but task.loss is '{self.loss}': leave it out"
                )
        if self.count is not None and not self.is_own:
            raise ValueError(
                f"task.count is for a loss of your own, but task.loss is '{self.loss}', which knows what it counts: "
                "leave it out"
            )
        return self


#: The losses that have a setting of their own.
_LOSSES_WITH = {
    "class_weights": CLASS_LOSSES,
    "label_smoothing": ("cross_entropy", "next_token"),
    "ignore_index": CLASS_LOSSES,
}


class GroupSection(_Section):
    """Parameters with settings of their own: those of the optimiser, under their own names."""

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


class OptimizerSection(_Section):
    """An optimiser; besides these keys, it has the arguments of its class in torch under their own names."""

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
        content = self._needed_alike()
        return 0 if content == OptimizerSection()._needed_alike() else zlib.crc32(content.encode())

    def _needed_alike(self) -> str:
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
        return json.dumps(_with_floats(content), sort_keys=True, default=str)

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
            raise ValueError(f"optimizer.{key} is given with optimizer.factory, which makes its own groups")
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
            f"optimizer.{extra} is given with optimizer.factory, which makes the optimiser with all of its arguments: "
            "give only one of them"
        )


class DataSection(_Section):
    name: Literal[DATASETS] = "digits"  # type: ignore[valid-type]
    factory: str | None = None
    path: str | None = None
    partition: Literal["iid", "dirichlet", "shards"] = "iid"
    alpha: Fraction = 0.5
    shards_per_device: Positive = 2
    samples_per_device: Annotated[int | list[int] | None, BeforeValidator(_sizes)] = None
    validation: NotNegative | None = None
    test: NotNegative | None = None
    augment: bool = False
    shape: Annotated[tuple[int, ...], BeforeValidator(_shape)] | None = (
        None  # of synthetic images or a factory's samples
    )
    classes: Positive | None = None  # of synthetic images, tiny_imagenet or a factory's labels

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """The shape, if it is that of an image."""
        match self.shape:
            case (channels, height, width):
                return (channels, height, width)
            case _:
                return None

    @model_validator(mode="after")
    def _images(self) -> DataSection:
        if self.factory is None and self.shape is not None and len(self.shape) != 3:
            raise ValueError(
                f"data.shape = {list(self.shape)} is not the shape of an image, which {self.name} has; write "
                "[channels, height, width], or give data.factory for samples of your own"
            )
        return self


class PlanSection(_Section):
    split_point: PlanNumber = "auto"
    micro_batches: PlanNumber = "auto"
    estimate: Literal["simulation", "paper"] = "simulation"
    schedule: Literal["auto", "all-forward", "1f1b"] = "auto"
    window: Positive = 3
    replan: bool = True


class WireSection(_Section):
    encoding: Literal["auto", "raw", "sparse", "planes", "sparse-planes", "fp16", "bf16", "int8", "topk"] = "auto"


class ServerSection(_Section):
    cores: Positive | None = None
    speed: Fraction = 1.0
    profile: str | None = None
    listen: Annotated[str, AfterValidator(_address)] = "127.0.0.1:0"
    aggregator: Annotated[str, AfterValidator(known_aggregator)] = "fedavg"
    aggregation: Annotated[dict[str, Any], BeforeValidator(_table)] = Field(default_factory=dict)
    allow: Annotated[tuple[str, ...] | str | None, BeforeValidator(_allow)] = None  # names, or a file of them
    max_samples: Positive | None = None  # of one device
    min_devices: Positive | None = None  # all that are in the configuration
    round_deadline: Annotated[float | Literal["auto", "off"], BeforeValidator(_deadline)] = "auto"  # seconds
    resume_window: Annotated[float | Literal["auto"], BeforeValidator(_chosen_duration)] = "auto"
    keepalive: Annotated[float | Literal["auto"], BeforeValidator(_keepalive)] = "auto"
    checkpoint_every: NotNegative = 1  # rounds; 0 is never
    checkpoint_keep: Positive = 3
    activation_cache: Annotated[int, BeforeValidator(_cache_size)] = 2**30  # bytes of each device; 0 is off

    @property
    def proximal(self) -> float:
        """The weight mu of FedProx's proximal term; 0 without one."""
        return float(all_parameters("fedprox", self.aggregation)["proximal"]) if self.aggregator == "fedprox" else 0.0


class PrivacySection(_Section):
    clip: Fraction = 1.0
    noise_multiplier: Fraction | None = None
    target_epsilon: Fraction | None = None
    delta: Probability = 1e-5
    pixel_epsilon: Annotated[float, BeforeValidator(_refuse_bool), Field(gt=0, le=1)] | None = None
    pixel_delta: Probability = 0.05
    pixel_bound: Fraction = 0.1
    pixel_sensitivity: Fraction = 1.0
    label_epsilon: Fraction | None = None
    max_leakage: Share | None = None
    leakage: str | None = None

    @property
    def clips(self) -> bool:
        """True if devices clip what a round has changed in their part, and add noise to it."""
        return self.noise_multiplier is not None or self.target_epsilon is not None

    @property
    def pixel_scale(self) -> float:
        """The standard deviation of PixelDP's noise on the inputs, sqrt(2 ln(1.25 / delta)) Delta L / epsilon; or 0."""
        if self.pixel_epsilon is None:
            return 0.0
        spread = math.sqrt(2 * math.log(1.25 / self.pixel_delta))
        return spread * self.pixel_sensitivity * self.pixel_bound / self.pixel_epsilon

    @model_validator(mode="after")
    def _measured_leakage(self) -> PrivacySection:
        if self.max_leakage is not None and self.leakage is None:
            raise ValueError(
                f"privacy.max_leakage = {self.max_leakage:g} needs privacy.leakage, the file with what each cut leaks: "
                "`pipar leakage` writes it"
            )
        return self


class DeviceSection(_Section):
    name: Annotated[str, AfterValidator(_named("._-"))] = "device"
    count: UpToAMillion = 1
    link: Annotated[Link, BeforeValidator(parse_link)] = Link(up_bps=10e6, down_bps=25e6)
    speed: Fraction = 0.05
    profile: str | None = None
    memory: Annotated[int | None, BeforeValidator(_size)] = None  # bytes; with a named machine, the machine's
    split_point: PlanNumber | None = None
    micro_batches: PlanNumber | None = None

    @model_validator(mode="before")
    @classmethod
    def _own_speed(cls, tree: Any) -> Any:
        """Set the default speed of a device with a profile to 1: the profile includes the device's speed."""
        if isinstance(tree, Mapping) and tree.get("profile") is not None and "speed" not in tree:
            return {**tree, "speed": 1.0}
        return tree


class Config(_Section):
    """A whole configuration; `Config()` is what an empty file means."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    optimizer: OptimizerSection = OptimizerSection()
    data: DataSection = DataSection()
    plan: PlanSection = PlanSection()
    wire: WireSection = WireSection()
    server: ServerSection = ServerSection()
    privacy: PrivacySection = PrivacySection()
    devices: Annotated[tuple[DeviceSection, ...], BeforeValidator(_groups)] = (DeviceSection(count=4),)

    @model_validator(mode="after")
    def _sizes_match_devices(self) -> Config:
        sizes = self.data.samples_per_device
        count = sum(group.count for group in self.devices)
        if isinstance(sizes, list) and len(sizes) != count:
            raise ValueError(f"data.samples_per_device lists {len(sizes)} sizes for {count} devices: give one for each")
        names = [spec.name for spec in device_specs(self)]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"Two devices are called '{twice}'; give each group of devices its own name")
        return self

    @model_validator(mode="after")
    def _privacy_fits(self) -> Config:
        check_private_updates(self)
        return self

    @model_validator(mode="after")
    def _clipping_fits(self) -> Config:
        check_clipping(self)
        return self

    @model_validator(mode="after")
    def _enough_are_allowed(self) -> Config:
        allowed, wanted = self.server.allow, self.server.min_devices
        if isinstance(allowed, tuple) and wanted is not None and wanted > len(allowed):
            raise ValueError(
                f"server.min_devices = {wanted}, but server.allow names only {len(allowed)} devices, so the training "
                "would never start: allow more devices, or lower server.min_devices"
            )
        return self

    @model_validator(mode="after")
    def _enough_are_drawn(self) -> Config:
        given, devices, least = self.run.devices_per_round, self.device_count, self.server.min_devices
        if given == "all":
            return self
        if given > devices:
            raise ValueError(
                f"run.devices_per_round = {given}, but [[devices]] has only {devices}: give a smaller number, or 'all'"
            )
        drawn = self.drawn_count
        if least is not None and drawn < least:
            raise ValueError(
                f"run.devices_per_round = {given} draws {drawn} of {devices} devices, fewer than server.min_devices = "
                f"{least}: draw more, or lower server.min_devices"
            )
        if self.optimizer.state_at_aggregation == "keep":
            raise ValueError(
                "optimizer.state_at_aggregation = 'keep' cannot be combined with run.devices_per_round: the server "
                "keeps nothing of devices that are not drawn. Write 'reset', or draw 'all'"
            )
        return self

    @property
    def device_count(self) -> int:
        """The number of devices in [[devices]]."""
        return sum(group.count for group in self.devices)

    @property
    def drawn_count(self) -> int:
        """The number of these that take part in a round, if all are present."""
        return drawn_devices(self.run.devices_per_round, self.device_count)

    @model_validator(mode="after")
    def _aggregator_fits(self) -> Config:
        server = self.server
        parameters = all_parameters(server.aggregator, server.aggregation)
        check_method(server.aggregator, METHODS[self.run.method])
        check_devices(server.aggregator, parameters, self.drawn_count)
        return self


def hints(config: Config) -> list[str]:
    """Return a sentence about each key that has another name now."""
    if "momentum_at_aggregation" not in config.optimizer.model_fields_set:
        return []
    return [
        "optimizer.momentum_at_aggregation is now optimizer.state_at_aggregation, for all optimisers; the former name "
        "is still accepted."
    ]


def draws_devices(given: int | float | Literal["all"]) -> bool:
    """Return whether some devices may not take part in a round; the number 1 is one device, 1.0 is all of them."""
    return given != "all" and not (isinstance(given, float) and given == 1.0)


def drawn_devices(given: int | float | Literal["all"], present: int, least: int = 1) -> int:
    """Return how many of the present devices take part in a round: all, a number, or a share rounded to the nearest.

    There are `least` at the least, if as many are present.
    """
    if given == "all":
        return present
    wanted = given if isinstance(given, int) else int(given * present + 0.5)
    return min(present, max(1, least, wanted))


def validated_keys(config: Config) -> dict[str, Any]:
    """Return the keys, with their values, that need a validation set."""
    run = config.run
    patience = {} if run.patience is None else {"run.patience": run.patience}
    return {**patience, **({"run.keep": "'best'"} if run.keep == "best" else {})}


def refuse_cut_points(config: Config) -> None:
    """Raise ConfigError if cut points are given for one of pipar's own networks."""
    if config.model.cut_points is not None:
        raise ConfigError(
            f"model.cut_points is for your own network, but model.name is '{config.model.name}', which can be cut "
            "after each of its layers: leave it out, or give model.factory."
        )


def check_clipping(config: Config) -> None:
    """Raise ValueError if gradients cannot be clipped across the cut with this method."""
    if config.optimizer.clips_across and METHODS[config.run.method].shares_server_model:
        raise ValueError(
            f"optimizer.clip_norm with optimizer.clip = 'global' needs a server-side model for each device, but in "
            f"'{config.run.method}' all share one, which would stand still while a device measures its gradient: write "
            "clip = 'side', or use fl, sfl or pipar"
        )


#: With clips and noise multipliers beyond these, float64 overflows or underflows: a device would add less noise than it
#: counts.
LEAST_SCALE, LARGEST_SCALE = 1e-100, 1e100
#: A larger epsilon promises nothing, and solving for its noise gives numbers that are not finite.
_LARGEST_EPSILON = 1e9


def check_private_updates(config: Config) -> None:
    """Raise ValueError if updates get noise but something else that a device sends in a round would not."""
    if not config.privacy.clips:
        return
    for key in ("clip", "noise_multiplier"):
        value = getattr(config.privacy, key)
        if value is not None and not LEAST_SCALE <= value <= LARGEST_SCALE:
            raise ValueError(f"privacy.{key} = {value:g} is not allowed: give a number from 1e-100 to 1e100")
    if (target := config.privacy.target_epsilon) is not None and target > _LARGEST_EPSILON:
        raise ValueError(f"privacy.target_epsilon = {target:g} is not allowed: give a number of at most 1e9")
    if METHODS[config.run.method].shares_server_model:
        raise ValueError(
            f"Noise on updates (privacy.noise_multiplier, privacy.target_epsilon) needs one of the methods fl, sfl and "
            f"pipar, but run.method is '{config.run.method}'"
        )
    if config.optimizer.clips_across and METHODS[config.run.method].splits:
        raise ValueError(
            "optimizer.clip = 'global' cannot be combined with noise on updates (privacy.noise_multiplier, "
            "privacy.target_epsilon): devices would send the norms of their gradients without noise. Write 'side'"
        )
    if config.optimizer.state_at_aggregation == "keep":
        raise ValueError(
            "optimizer.state_at_aggregation = 'keep' cannot be combined with noise on updates "
            "(privacy.noise_multiplier, privacy.target_epsilon): optimiser state of layers that change sides would be "
            "sent without noise. Write 'reset'"
        )


@dataclass(frozen=True)
class DeviceSpec:
    """One device of a group, with its own name; "auto" where the planner chooses."""

    name: str
    link: Link
    speed: float
    profile: str | None
    split_point: int | Literal["auto"]
    micro_batches: int | Literal["auto"]
    memory_bytes: int | None = None


def device_specs(config: Config) -> tuple[DeviceSpec, ...]:
    """Return every device in name order: names are padded, so that device-02 comes before device-10."""
    return tuple(sorted(_expanded_groups(config), key=lambda spec: spec.name))


def device_names(config: Config) -> list[str]:
    """Return the devices' names in the order of the configuration: the order of lists with an entry for each device."""
    return [spec.name for spec in _expanded_groups(config)]


def _expanded_groups(config: Config) -> list[DeviceSpec]:
    counts: dict[str, int] = {}
    for group in config.devices:
        counts[group.name] = counts.get(group.name, 0) + group.count
    taken = dict.fromkeys(counts, 0)
    specs = []
    for group in config.devices:
        for _ in range(group.count):
            taken[group.name] += 1
            specs.append(_device_spec(config, group, taken[group.name], counts[group.name]))
    return specs


def _device_spec(config: Config, group: DeviceSection, number: int, count: int) -> DeviceSpec:
    alone = count == 1 and group.name != "device"
    return DeviceSpec(
        name=group.name if alone else f"{group.name}-{number:0{len(str(count))}d}",
        link=group.link,
        speed=group.speed,
        profile=group.profile,
        split_point=config.plan.split_point if group.split_point is None else group.split_point,
        micro_batches=config.plan.micro_batches if group.micro_batches is None else group.micro_batches,
        memory_bytes=group.memory,
    )
