"""A network that is cut after modules that the user names, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pipar.cutting.consecutive_modules import NoChainError, chained_stages, check_names
from pipar.cutting.cut_check import differs, dtype_of
from pipar.cutting.cut_points import CutList
from pipar.cutting.exporting import NoRecordingError
from pipar.cutting.listing import cuts_at, layer_cuts
from pipar.cutting.stage_line import (
    Line,
    Progress,
    fitting,
    line_at,
    line_of_stages,
    whole_line,
    with_effects,
)
from pipar.cutting.traced import CutPoint, TracedNetwork
from pipar.errors import ModelError
from pipar.tensors.inputs import Inputs


def named_line(
    network: nn.Module, names: Sequence[str], example: Inputs, progress: Progress = lambda _, __: None
) -> Line:
    """Return a network as a line of stages, one up to the end of each named module and one for the rest.

    Modules that run one after another are the stages themselves; otherwise recorded operations are divided. Raise
    ModelError if the network cannot be cut after one of them, or would then not train as the uncut network.
    """
    if not names:
        return whole_line(network, example)
    check_names(network, names)
    progress("Checking the cuts after the named modules", 0.0)
    try:
        line = _chained_line(network, names, example)
    except NoChainError as reason:
        progress("Recording the operations of the network", 0.1)
        line = _recorded_line(network, names, example, str(reason))
    progress("Checking the cuts after the named modules", 0.9)
    return with_effects(line, example)


def _chained_line(network: nn.Module, names: Sequence[str], example: Inputs) -> Line:
    stages = chained_stages(network, names, example)
    line = line_of_stages(stages, network)
    line.cuts = layer_cuts(dict(stages), example, "named")
    if differs(line, example):
        raise ModelError(
            f"the network cannot be cut after {_listed(names)}, because a step through the separate modules differs "
            "from that of the network: name other modules, or train it whole with model.cut_points = []."
        )
    return line


def _recorded_line(network: nn.Module, names: Sequence[str], example: Inputs, no_chain: str) -> Line:
    try:
        traced = TracedNetwork.of(network, example)
    except NoRecordingError as error:
        raise ModelError(
            f"{type(network).__name__} cannot be cut after {_listed(names)}: they do not run one after another, "
            f"because {no_chain}, and torch.export cannot record its operations: {error.cause}. Name other modules, or "
            "train it whole with --method fl, or with model.cut_points = []."
        ) from error
    points = [fitting(point, dtype_of(network)) for point in traced.cut_points_after(names)]
    for point in points:
        if point.reason is not None:
            raise _impossible(point, point.reason)
    line = line_at(points, traced, network)
    if differs(line, example):
        wrong = next((one for one in points if differs(line_at([one], traced, network), example)), points[0])
        raise _impossible(wrong, "a step through it differs from that of the uncut network")
    line.cuts = CutList("named", len(line), cuts_at(traced, points))
    return line


def _impossible(point: CutPoint, reason: str) -> ModelError:
    return ModelError(
        f"the network cannot be cut after '{point.module}', because {reason}: name another module in model.cut_points; "
        "`pipar cuts` without that key lists all cuts."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
