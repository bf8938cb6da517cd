"""From a configuration to a table of what its cuts reveal: attacks on samples of the first device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from pipar import random_streams
from pipar.cutting.split import named_layers
from pipar.data.images import Images
from pipar.errors import DataError, InputError, PlanError
from pipar.job.workload import Workload
from pipar.leakage.attacks import Attack
from pipar.leakage.measures import MIN_COMPARED, CutMeasurements, Progress, Samples, measure_cuts
from pipar.leakage.table import LeakageTable

#: Samples of a device for the distance correlation: more take longer and change little.
_COMPARED = 256
#: Maximum number of other samples that an attacker has.
_OTHERS = 5000


@dataclass(frozen=True)
class AuditResult:
    """A table of leakage with its images: the originals and the reconstructions of each attack."""

    table: LeakageTable
    originals: Tensor  # from 0 to 1
    measured: CutMeasurements


def audit_leakage(
    workload: Workload,
    attacks: Mapping[str, Attack],
    *,
    weights: Path | None = None,
    split_points: Sequence[int] | None = None,
    images: int = 16,
    progress: Progress = lambda _, __: None,
) -> AuditResult:
    """Return what the cuts of a workload's network reveal of the first device's samples.

    The network has its initial weights, or those from a file. P = Q is not measured: no activations leave a device.
    """
    config, model = workload.config, workload.checked_model()
    layers = tuple(named_layers(model))
    cuts = checked_cuts(split_points, len(layers), workload.model_name)
    first = "first ones of the seed" if config.model.weights is None else f"from {config.model.weights}"
    described = first if weights is None else load_weights(model, weights)
    samples = samples_of(workload, images)
    noise = config.privacy.pixel_scale
    measured = measure_cuts(model, samples, cuts, attacks, seed=config.run.seed, noise=noise, progress=progress)
    subject = workload.subject
    table = LeakageTable(
        subject.model,
        subject.norm,
        subject.dataset,
        subject.input_shape,
        layers,
        seed=config.run.seed,
        weights=described,
        pixel_scale=noise,
        images=len(samples.attacked),
        compared=len(samples.compared),
        others=len(samples.others),
        guess=samples.guess(),
        attacks={name: one.description for name, one in attacks.items()},
        cuts=measured.cuts,
    )
    return AuditResult(table, samples.pixels(samples.attacked), measured)


def checked_cuts(split_points: Sequence[int] | None, layers: int, model: str) -> list[int]:
    """Return the split points to measure in ascending order: those given, or all; without P = Q."""
    wrong = [p for p in split_points or () if not 1 <= p <= layers]
    if wrong:
        raise PlanError(
            f"split point {wrong[0]} is outside 1..{layers - 1}: {model} has {layers} layers, and after the last one "
            "no activations leave the device."
        )
    cuts = [p for p in sorted(set(split_points or range(1, layers))) if p < layers]
    if not cuts:
        raise PlanError(
            f"At P = {layers}, after the last layer of {model}, no activations leave the device, so nothing can be "
            f"attacked: give split points below {layers}."
        )
    return cuts


def load_weights(model: nn.Sequential, file: Path) -> str:
    """Load a run's weights into the model; return a description of them."""
    try:
        content = file.read_bytes()
        state = safetensors.torch.load(content)
    except OSError as error:
        raise InputError(
            f"Cannot read the weights {file}: {error.strerror}. Give the model.safetensors of a run."
        ) from None
    except (SafetensorError, ValueError):
        raise InputError(f"{file} is not a safetensors file: give the model.safetensors of a run.") from None
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if own != {name: tuple(value.shape) for name, value in state.items()}:
        raise InputError(
            f"{file} has the weights of a network other than the configured one: give the run's own configuration, "
            f"{file.parent / 'config.toml'}."
        )
    model.load_state_dict(state)
    return f"{file.name} with SHA-256 {hashlib.sha256(content).hexdigest()[:16]}"


# --- samples


def samples_of(workload: Workload, images: int) -> Samples:
    """Return samples of the first device to attack, and held-out samples as the attacker's own."""
    shard = workload.samples.shard(workload.names[0])
    if not workload.samples.form.is_floats:
        raise DataError(
            f"The attacks restore samples of floating-point numbers in one tensor, but samples are "
            f"{workload.samples.form}: what a cut reveals of them cannot be measured."
        )
    if len(shard) < MIN_COMPARED:
        raise DataError(
            f"{workload.names[0]} has {len(shard)} samples, but at least {MIN_COMPARED} are needed to compare "
            "them: give it more."
        )
    order = random_streams.generator(workload.config.run.seed, "leakage", "attacked").permutation(len(shard))
    own = shard.images.take(shard.indices[order[:_COMPARED]])
    compared, others = own.normalised(own.images, workload.dtype), _others(workload)
    lowest, highest = _range(own, torch.cat([compared, others]))
    return Samples(compared[:images], compared, others, lowest, highest)


def _others(workload: Workload) -> Tensor:
    """Return held-out samples, which no device has."""
    found: list[Tensor] = []
    for which in ("validation", "test"):
        held, left = workload.samples.held_out(which), _OTHERS - sum(map(len, found))
        if held is not None:
            found.append(held.normalised(held.images[:left], workload.dtype))
    if not sum(map(len, found)):
        raise DataError(
            "An attacker needs samples that no device has, and there are no held-out ones: give data.validation or "
            "data.test."
        )
    return torch.cat(found)


def _range(images: Images, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of black and white: of bytes after normalisation, of other numbers the lowest and highest."""
    if images.images.dtype == torch.uint8:
        channels, *sides = images.shape
        ends = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, *[1] * len(sides))
        black, white = images.normalised(ends.expand(2, channels, *[1] * len(sides)), samples.dtype)
        return black[None], white[None]
    low, high = samples.min(), samples.max()
    return low, torch.maximum(high, low + 1e-6)
