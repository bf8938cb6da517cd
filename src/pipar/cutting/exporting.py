"""The operations of a network as torch.export records them, or one sentence that says why they cannot be recorded."""

from __future__ import annotations

import inspect
import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipar.cutting.custom_backward import custom_backward
from pipar.cutting.forward_effects import unrecorded_state
from pipar.cutting.recorded_graph import attribute
from pipar.errors import ModelError
from pipar.tensors.inputs import Inputs, rebuilt, tensors_of

#: What a recording can hold.
_HELD = (Tensor, fx.GraphModule)
_ASSERTIONS = (torch.ops.aten._assert_tensor_metadata.default,)


class NoRecordingError(ModelError):
    """The operations of a network cannot be recorded; `cause` is why."""

    def __init__(self, network: str, cause: str) -> None:
        super().__init__(
            f"{network} cannot be cut, because torch.export cannot record its operations: {cause}. Name modules that "
            "run one after another in model.cut_points, or train it whole with --method fl, or with "
            "model.cut_points = []."
        )
        self.cause = cause


def recorded(network: nn.Module, example: Inputs) -> fx.GraphModule:
    """Return the operations of a forward in train mode, with a batch of any size; raise NoRecordingError if unknown."""
    if cause := _lost(network, example):
        raise NoRecordingError(type(network).__name__, cause)
    with _attributes_kept(network):
        graph_module = _exported(network, example).module(check_guards=False)
    assert isinstance(graph_module, fx.GraphModule)
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target in _ASSERTIONS:
            graph_module.graph.erase_node(node)
        if node.op == "get_attr" and not isinstance(found := attribute(graph_module, str(node.target)), _HELD):
            raise NoRecordingError(type(network).__name__, f"its forward uses a {type(found).__name__}")
    return graph_module


@contextmanager
def _attributes_kept(network: nn.Module) -> Iterator[None]:
    """Restore the attributes that a forward sets: while it is recorded, tensors have no values."""
    before = {module: dict(vars(module)) for module in network.modules()}
    try:
        yield
    finally:
        for module, attributes in before.items():
            vars(module).clear()
            vars(module).update(attributes)


def _lost(network: nn.Module, example: Inputs) -> str | None:
    """Return why a recording would not train as the network does; None if it would."""
    try:
        own = custom_backward(network, example)
        state = unrecorded_state(network, example)
    except Exception as error:
        raise NoRecordingError(type(network).__name__, _cause(error, "")) from error
    if own is not None:
        return f"{own}, and a recording would lose these gradients"
    return None if state is None else f"{state}, and a recording would do the same every time"


def _exported(network: nn.Module, example: Inputs) -> torch.export.ExportedProgram:
    batch = {0: torch.export.Dim("batch", min=1)}
    given = tensors_of(example)
    shapes = (batch,) if _is_named(network, example) else (tuple(batch for _ in given),)
    modes = [(module, module.training) for module in network.modules()]
    said = io.StringIO()
    try:
        with torch.random.fork_rng(devices=[]), _told_to(said), _taking_tensors(network, example):
            return torch.export.export(network.train(), given, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise NoRecordingError(type(network).__name__, _cause(error, said.getvalue())) from error
    finally:
        for module, training in modes:
            module.training = training


def _is_named(network: nn.Module, example: Inputs) -> bool:
    """Return whether the only input is a parameter of its own; to torch.export, those in `*args` are one tuple."""
    first = next(iter(inspect.signature(network.forward).parameters.values()), None)
    return isinstance(example, Tensor) and (first is None or first.kind is not first.VAR_POSITIONAL)


@contextmanager
def _taking_tensors(network: nn.Module, example: Inputs) -> Iterator[None]:
    """Let a network that takes a tuple or a dictionary take its tensors one after another, in their order.

    Then torch.export records them in this order, whatever the signature of the network's own forward is.
    """
    if isinstance(example, Tensor):
        yield
        return
    own, had_own = network.forward, "forward" in vars(network)
    network.forward = lambda *given: _called(own, rebuilt(example, given))
    try:
        yield
    finally:
        if had_own:
            network.forward = own
        else:
            del network.forward


def _called(forward: Any, inputs: Inputs) -> Any:
    return forward(**inputs) if isinstance(inputs, dict) else forward(*tensors_of(inputs))


@contextmanager
def _told_to(stream: io.StringIO) -> Iterator[None]:
    """Let torch print into a stream what it prints before it raises, and warn and log nothing."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    enabled = [logger for logger in loggers if not logger.disabled]
    for logger in enabled:
        logger.disabled = True
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(stream):
            yield
    finally:
        for logger in enabled:
            logger.disabled = False


def _cause(error: Exception, said: str) -> str:
    """Return why operations cannot be recorded: the line of code if torch names one, and its first sentence."""
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    sentence = re.sub(r"\s+", " ", first).strip().rstrip(".")[:200]
    if "Constraints violated (batch)" in sentence:
        return "its operations depend on the number of samples in a batch"
    if "data-dependent" not in sentence:
        return sentence
    places = re.findall(r"# File: (\S+) in .*?, code: (.*)", said)
    where = f" in {Path(places[-1][0]).name}, `{places[-1][1].strip()}`" if places else ""
    return f"its operations depend on the values of its inputs{where}"
