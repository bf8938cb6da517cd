"""What the best model and early stopping go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: What is compared unless run.monitor names a metric.
VAL_LOSS = "val_loss"
#: Before the name of a value that is the mean over the devices' own samples, as in "devices/accuracy".
ON_DEVICES = "devices/"


@dataclass(frozen=True)
class Monitor:
    """What the best model and the patience of a training go by: the validation loss, or a metric by its name."""

    name: str = VAL_LOSS
    higher_is_better: bool = False

    def of(
        self, loss: float | None, metrics: Mapping[str, float], on_devices: Mapping[str, float] | None = None
    ) -> float | None:
        """Return what is compared, of which lower is better: a metric of which higher is better changes its sign."""
        if self.name.startswith(ON_DEVICES):
            value = (on_devices or {}).get(self.name.removeprefix(ON_DEVICES))
        else:
            value = loss if self.name == VAL_LOSS else metrics.get(self.name)
        return -value if value is not None and self.higher_is_better else value
