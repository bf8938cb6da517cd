"""The user's own network, checked and made ready to be cut after each of its layers or stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn

from pipar.cutting.named_cuts import named_line
from pipar.cutting.sequence import grouped_line, sequence_line, uses_twice
from pipar.cutting.stage_line import Line, line_of, whole_line
from pipar.events import Observer, Preparing
from pipar.job.cut_cache import kept_line
from pipar.networks.models import (
    check_fits,
    check_step,
    hides_effects,
    is_known,
    is_sequential,
)
from pipar.tasks.task import Task
from pipar.tensors.inputs import InputForm, Inputs


@dataclass(frozen=True)
class UserNetworkCutter:
    """Cuts networks that are trained for one task."""

    names: Sequence[str] | None  # of the modules to cut after; None: wherever it is possible
    form: InputForm
    task: Task
    dtype: torch.dtype
    observe: Observer
    splits: bool  # the method cuts networks

    def cut(self, model: nn.Module) -> nn.Sequential:
        """Return a sequence as it is, and any other network as a line of stages; raise ModelError if it is unusable."""
        check_fits(model, self.form, self.task)  # before torch.export says something else about it
        example = self.form.example(2, self.dtype)
        if self.names is None and is_sequential(model):
            return self._sequence(cast(nn.Sequential, model), example)
        if self.splits and self.names != ():
            return kept_line(model, self.form, self.dtype, self.names, partial(self._line, model, example))
        check_step(model, self.form, self.task)
        return whole_line(model, example)

    def _sequence(self, model: nn.Sequential, example: Inputs) -> nn.Sequential:
        check_step(model, self.form, self.task)
        if not self.splits:
            return whole_line(model, example) if hides_effects(model, example) else model
        line = grouped_line(model, example, is_known=all(map(is_known, model.modules())))
        is_plain = not uses_twice(model) and not hides_effects(model, example)
        return line or (model if is_plain else sequence_line(model, example))

    def _line(self, model: nn.Module, example: Inputs) -> Line:
        """Return the line of a network of which no stages are kept on disk."""
        check_step(model, self.form, self.task)
        if self.names is None:
            return line_of(model, example, self._tell)
        return named_line(model, self.names, example, self._tell)

    def _tell(self, what: str, share: float) -> None:
        self.observe(Preparing(what, share))
