"""Which cuts a configuration rules out because their activations reveal too much about the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipar.errors import ConfigError, PlanError
from pipar.leakage.table import LeakageTable, Subject
from pipar.methods import METHODS
from pipar.settings.config import Config, device_specs

#: The attack that a limit must be measured with: resisting only a weak attack means nothing.
STRONGEST = "decoder"


@dataclass(frozen=True)
class LeakageLimit:
    """`privacy.max_leakage`, and the table of measurements for this training."""

    config: Config
    most: float
    table: LeakageTable

    @classmethod
    def of(cls, config: Config, subject: Subject) -> LeakageLimit | None:
        """Return the limit of a configuration, None without one; raise if its file is for another training."""
        privacy = config.privacy
        if privacy.max_leakage is None or privacy.leakage is None:
            return None
        table = LeakageTable.load(Path(privacy.leakage))
        if table.subject != subject:
            raise ConfigError(
                f"privacy.leakage = {privacy.leakage} was measured for {table.subject}, but this training is of "
                f"{subject}: measure it with 'pipar leakage'."
            )
        if STRONGEST not in table.attacks:
            raise ConfigError(
                f"privacy.leakage = {privacy.leakage} was measured with {', '.join(table.attacks)} only, but a limit "
                f"needs the strongest attack, {STRONGEST}: measure again with 'pipar leakage'."
            )
        if table.pixel_scale > privacy.pixel_scale:
            raise ConfigError(
                f"privacy.leakage = {privacy.leakage} was measured with noise of {table.pixel_scale:g} on the inputs, "
                f"but this training has {privacy.pixel_scale:g}, which hides less: measure again with 'pipar leakage'."
            )
        return cls(config, privacy.max_leakage, table)

    def leaky_cuts(self, layers: Sequence[str]) -> dict[int, float]:
        """Return the forbidden split points with their leakage; P = Q is never one of them.

        A cut that was not measured counts as revealing everything. Raise if the network has other layers, if a cut that
        might be chosen was not measured, or if a configured one leaks too much. A configured split point is checked
        for every method: a method that ignores it may be compared with one that does not.
        """
        self._check_layers(layers)
        asked = {spec.split_point for spec in device_specs(self.config)}
        every = range(1, len(layers))
        self._check_measured([p for p in every if p in asked or ("auto" in asked and self._splits)])
        leaky = {p: leakage for p in every if (leakage := self.table.leakage.get(p, 1.0)) > self.most}
        self._check_asked(leaky, len(layers))
        return leaky

    @property
    def _splits(self) -> bool:
        return METHODS[self.config.run.method].splits

    @property
    def _file(self) -> str:
        return f"privacy.leakage = {self.config.privacy.leakage}"

    def _check_layers(self, layers: Sequence[str]) -> None:
        if tuple(layers) != self.table.layers:
            raise ConfigError(
                f"{self._file} was measured for a network with the layers {', '.join(self.table.layers)}, but this one "
                f"has {', '.join(layers)}: measure it with 'pipar leakage'."
            )

    def _check_measured(self, needed: Sequence[int]) -> None:
        missing = [str(p) for p in needed if p not in self.table.leakage]
        if missing:
            raise ConfigError(
                f"{self._file} has no measurement for the split point{'s' if len(missing) > 1 else ''} "
                f"{', '.join(missing)}, which might be chosen: measure all with 'pipar leakage', or give split points "
                "that were measured."
            )

    def _check_asked(self, leaky: dict[int, float], layers: int) -> None:
        for spec in device_specs(self.config):
            p = spec.split_point
            if p != "auto" and p in leaky:
                allowed = ", ".join(str(other) for other in range(1, layers + 1) if other not in leaky)
                raise PlanError(
                    f"{spec.name} has the split point {p}, which leaks {leaky[p]:.3f}, more than "
                    f"privacy.max_leakage = {self.most:g}: choose one of {allowed} or 'auto', or raise the limit."
                )
