"""Whether two profiles, or a profile and a network, are of the same network."""

from __future__ import annotations

from dataclasses import dataclass

from pipar.errors import ConfigError
from pipar.profiling.profile import Profile

#: Two measurements of one machine differ by up to this share.
_SCATTER = 0.1


@dataclass(frozen=True)
class NetworkSizes:
    """A network on any machine: the names of its layers, one sample's output bytes, parameter bytes."""

    model: str
    dtype: str
    names: tuple[str, ...]
    output_bytes: tuple[int, ...]
    parameter_bytes: tuple[int, ...]

    @classmethod
    def of(cls, profile: Profile) -> NetworkSizes:
        """Return the sizes in a profile of the whole network."""
        layers = profile.layers
        return cls(
            profile.model,
            profile.dtype,
            names=tuple(layer.name for layer in layers),
            output_bytes=tuple(layer.output_bytes for layer in layers),
            parameter_bytes=tuple(layer.parameter_bytes for layer in layers),
        )


def check_network(profile: Profile, network: NetworkSizes, source: str) -> Profile:
    """Return the profile if it is one of this network, or of its first layers and says so; else raise ConfigError.

    `source` is where the profile comes from.
    """
    problem = network_difference(profile, network)
    if problem:
        raise ConfigError(f"The profile {source} is of {profile.model} {problem}: write another with 'pipar profile'.")
    return profile


def network_difference(profile: Profile, network: NetworkSizes) -> str | None:
    """Return how a profile's network differs from the given one; None if it does not."""
    here, all_layers = len(profile.layers), len(network.names)
    if profile.network_layers != all_layers:
        return f"with {profile.network_layers} layers, but {network.model} has {all_layers}"
    if profile.dtype != network.dtype:
        return f"in {profile.dtype}, but {network.model} is trained in {network.dtype}"
    names = tuple(layer.name for layer in profile.layers)
    if names != network.names[:here]:
        number = next(n for n in range(here) if names[n] != network.names[n])
        return (
            f"whose layer {number + 1} is '{names[number]}', but that of {network.model} is '{network.names[number]}'"
        )
    for number, layer in enumerate(profile.layers, start=1):
        for key, wanted in (("output_bytes", network.output_bytes), ("parameter_bytes", network.parameter_bytes)):
            if getattr(layer, key) != wanted[number - 1]:
                return (
                    f"with {getattr(layer, key)} {key} in layer {number} '{layer.name}', but {network.model} has "
                    f"{wanted[number - 1]} there (other inputs, classes or normalisation)"
                )
    return None


def are_alike(one: Profile, other: Profile) -> bool:
    """Return whether two are of the same network on machines of the same speed, up to the scatter of measurements."""
    if one == other:
        return True
    if NetworkSizes.of(one) != NetworkSizes.of(other) or one.batch_sizes != other.batch_sizes:
        return False
    return all(abs(a - b) <= _SCATTER * max(a, b) for a, b in zip(_pass_s(one), _pass_s(other), strict=True))


def _pass_s(profile: Profile) -> list[float]:
    sizes = range(len(profile.batch_sizes))
    return [sum(layer.forward_s[n] + layer.backward_s[n] for layer in profile.layers) for n in sizes]
