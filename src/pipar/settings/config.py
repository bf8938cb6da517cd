"""The configuration: TOML sections as frozen records, every key with a default; an error is one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from pipar.errors import ConfigError
from pipar.methods import METHODS
from pipar.monitored_metric import VAL_LOSS
from pipar.settings import values
from pipar.settings.aggregators import all_parameters, check_devices, check_method, known_aggregator
from pipar.settings.links import Link, parse_link
from pipar.settings.sample_tensors import checked_sample_tensors
from pipar.settings.training_sections import OptimizerSection, Section, TaskSection
from pipar.settings.values import (
    Epochs,
    Fraction,
    LocalEpochs,
    NotNegative,
    PlanNumber,
    Positive,
    Probability,
    Share,
    Threads,
    UpToAMillion,
)

MODELS = ("vgg5", "resnet18", "mobilenetv3_small", "vgg16", "resnet101", "mobilenetv3_large")
DATASETS = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "tiny_imagenet", "synthetic")


def _groups(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(g, Mapping | Section) for g in value):
        raise ValueError("is not allowed: write [[devices]] with its keys below it, once for each group of devices")
    return value


class RunSection(Section):
    name: Annotated[str, AfterValidator(values.named("._+-"))] | None = None
    method: Literal["pipar", "fl", "sl", "sfl", "sfl2"] = "pipar"
    epochs: Epochs = 5
    local_epochs: LocalEpochs = 1  # passes over its samples before a device returns its part
    devices_per_round: Annotated[int | float | Literal["all"], BeforeValidator(values.drawn)] = (
        "all"  # or a share up to 1
    )
    batch_size: UpToAMillion = 100
    seed: NotNegative = 0
    patience: Positive | None = None
    keep: Literal["best", "last"] = "last"  # the model in model.safetensors
    monitor: str = VAL_LOSS  # what patience and the best model go by; or the name of a metric
    trace: Literal["auto", "full", "sampled", "off"] = "auto"
    trackers: Annotated[tuple[str, ...], BeforeValidator(values.trackers)] = ()


class ModelSection(Section):
    name: Literal[MODELS] = "vgg5"  # type: ignore[valid-type]
    factory: str | None = None
    weights: str | None = None  # a safetensors file to start from
    cut_points: Annotated[tuple[str, ...] | None, BeforeValidator(values.module_paths)] = None  # None: every usable cut
    freeze: list[str] = Field(default_factory=list)  # patterns of the names of parameters that are not trained
    norm: Literal["batch", "group", "none"] = "group"
    dtype: Literal["float32", "float64"] = "float32"


class DataSection(Section):
    name: Literal[DATASETS] = "digits"  # type: ignore[valid-type]
    factory: str | None = None
    path: str | None = None
    partition: Literal["iid", "dirichlet", "shards"] = "iid"
    alpha: Fraction = 0.5
    shards_per_device: Positive = 2
    samples_per_device: Annotated[int | list[int] | None, BeforeValidator(values.sizes)] = None
    validation: NotNegative | None = None
    test: NotNegative | None = None
    evaluate_on_devices: Annotated[float, BeforeValidator(values.held_out_share)] = 0.0  # of each device's samples
    augment: bool = False
    shape: Annotated[tuple[int, ...], BeforeValidator(values.shape)] | None = (
        None  # of synthetic images or a factory's samples
    )
    inputs: Annotated[Any, BeforeValidator(checked_sample_tensors)] = None  # what a factory's sample is
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
        if self.inputs is not None and (self.factory is None or self.shape is not None):
            other = "no data.factory" if self.factory is None else "also data.shape, which is for one tensor of numbers"
            raise ValueError(f"data.inputs says what the samples of data.factory are, but there is {other}")
        return self


class PlanSection(Section):
    split_point: PlanNumber = "auto"
    micro_batches: PlanNumber = "auto"
    estimate: Literal["simulation", "paper"] = "simulation"
    schedule: Literal["auto", "all-forward", "1f1b"] = "auto"
    window: Positive = 3
    replan: bool = True


class WireSection(Section):
    encoding: Literal["auto", "raw", "sparse", "planes", "sparse-planes", "fp16", "bf16", "int8", "topk"] = "auto"


class ServerSection(Section):
    cores: Positive | None = None
    threads: Threads = 1  # that compute micro-batches of one device
    speed: Fraction = 1.0
    profile: str | None = None
    listen: Annotated[str, AfterValidator(values.address)] = "127.0.0.1:0"
    aggregator: Annotated[str, AfterValidator(known_aggregator)] = "fedavg"
    aggregation: Annotated[dict[str, Any], BeforeValidator(values.table)] = Field(default_factory=dict)
    allow: Annotated[tuple[str, ...] | str | None, BeforeValidator(values.allow)] = None  # names, or a file of them
    max_samples: Positive | None = None  # of one device
    min_devices: Positive | None = None  # all that are in the configuration
    round_deadline: Annotated[float | Literal["auto", "off"], BeforeValidator(values.deadline)] = "auto"  # seconds
    resume_window: Annotated[float | Literal["auto"], BeforeValidator(values.chosen_duration)] = "auto"
    keepalive: Annotated[float | Literal["auto"], BeforeValidator(values.keepalive)] = "auto"
    checkpoint_every: NotNegative = 1  # rounds; 0 is never
    checkpoint_keep: Positive = 3
    activation_cache: Annotated[int, BeforeValidator(values.cache_size)] = 2**30  # bytes of each device; 0 is off
    torch_device: Annotated[str, AfterValidator(values.torch_device)] = "cpu"  # or "auto", "cuda", "cuda:1", "mps", ...
    autocast: Literal["off", "bf16"] = "off"

    @property
    def proximal(self) -> float:
        """The weight mu of FedProx's proximal term; 0 without one."""
        return float(all_parameters("fedprox", self.aggregation)["proximal"]) if self.aggregator == "fedprox" else 0.0


class PrivacySection(Section):
    clip: Fraction = 1.0
    noise_multiplier: Fraction | None = None
    target_epsilon: Fraction | None = None
    delta: Probability = 1e-5
    pixel_epsilon: Annotated[float, BeforeValidator(values.refuse_bool), Field(gt=0, le=1)] | None = None
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
                f"privacy.max_leakage = {self.max_leakage:g} needs privacy.leakage, a file of measurements: "
                "`pipar leakage` writes it"
            )
        return self


class DeviceSection(Section):
    name: Annotated[str, AfterValidator(values.named("._-"))] = "device"
    count: UpToAMillion = 1
    link: Annotated[Link, BeforeValidator(parse_link)] = Link(up_bps=10e6, down_bps=25e6)
    speed: Fraction = 0.05
    profile: str | None = None
    memory: Annotated[int | None, BeforeValidator(values.size)] = None  # bytes; with a named machine, the machine's
    threads: Threads = "auto"  # that compute one stage
    split_point: PlanNumber | None = None
    micro_batches: PlanNumber | None = None
    torch_device: Annotated[str, AfterValidator(values.torch_device)] = "cpu"  # or "auto", "cuda", "cuda:1", "mps", ...
    autocast: Literal["off", "bf16"] = "off"

    @model_validator(mode="before")
    @classmethod
    def _own_speed(cls, tree: Any) -> Any:
        """Set the default speed of a device with a profile to 1: the profile includes the device's speed."""
        if isinstance(tree, Mapping) and tree.get("profile") is not None and "speed" not in tree:
            return {**tree, "speed": 1.0}
        return tree


class Config(Section):
    """A whole configuration; `Config()` is what an empty file means.

    >>> config = pipar.Config(run={"epochs": 2, "devices_per_round": 2})
    >>> config.drawn_count, config.device_count, config.optimizer.name
    (2, 4, 'sgd')
    """

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
    def _evaluation_fits(self) -> Config:
        if self.data.evaluate_on_devices:
            check_private_evaluation(self.privacy)
        return self

    @model_validator(mode="after")
    def _clipping_fits(self) -> Config:
        check_clipping(self)
        return self

    @model_validator(mode="after")
    def _autocast_fits(self) -> Config:
        given = {"devices": any(one.autocast != "off" for one in self.devices), "server": self.server.autocast != "off"}
        for name, is_given in given.items():
            if is_given and self.model.dtype == "float64":
                raise ValueError(
                    f"{name}.autocast = 'bf16' rounds to 8 bits what model.dtype = 'float64' asks to compute exactly: "
                    "write autocast = 'off', or model.dtype = 'float32'"
                )
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
    """Return a sentence about each given key that has been renamed."""
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

    It is at least `least`, if that many are present.
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
            f"'{config.run.method}' all devices share one, which would have to wait for each device's gradient: write "
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


def check_private_evaluation(privacy: PrivacySection) -> None:
    """Raise ValueError if samples are protected by noise: the values of a device's evaluation have none."""
    for key in ("noise_multiplier", "target_epsilon", "pixel_epsilon", "label_epsilon"):
        if getattr(privacy, key) is not None:
            raise ValueError(
                f"Evaluation on devices (data.evaluate_on_devices) sends values without noise, which privacy.{key} "
                "does not cover: unset one of them"
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
    torch_device: str = "cpu"
    autocast: Literal["off", "bf16"] = "off"
    threads: int | Literal["auto"] = "auto"


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
        torch_device=group.torch_device,
        autocast=group.autocast,
        threads=group.threads,
    )
