"""The six networks of the paper by name, and the checks of a user's own network."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from pipar.errors import ModelError
from pipar.nn.blocks import NORMS
from pipar.nn.inputs import InputForm, call
from pipar.nn.line import Line
from pipar.nn.losses import checked_total
from pipar.nn.mobilenet import mobilenetv3_large, mobilenetv3_small
from pipar.nn.own_backward import hooked_parameter
from pipar.nn.resnet import resnet18, resnet101
from pipar.nn.tasks import Task
from pipar.nn.vgg import vgg5, vgg16

InputShape = tuple[int, int, int]


#: What to do about weights on other devices.
_ON_THE_CPU = {"meta": "build it with values, outside of torch.device('meta')"}

_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True)
class Network:
    """One of the paper's networks: its number of layers Q, and the minimum height and width of its input.

    At the minimum size, every layer that halves the map still has at least two pixels to halve.
    """

    build: Callable[[InputShape, int, str], nn.Sequential]
    layers: int
    min_side: int


NETWORKS = {
    "vgg5": Network(vgg5, layers=5, min_side=4),
    "resnet18": Network(resnet18, layers=10, min_side=17),
    "mobilenetv3_small": Network(mobilenetv3_small, layers=15, min_side=17),
    "vgg16": Network(vgg16, layers=16, min_side=32),
    "resnet101": Network(resnet101, layers=35, min_side=17),
    "mobilenetv3_large": Network(mobilenetv3_large, layers=19, min_side=17),
}


def build_model(
    name: str,
    *,
    input_shape: InputShape,
    classes: int,
    norm: str = "group",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Sequential:
    """Return the named network for inputs (channels, height, width); it can be cut after each child.

    The weights depend only on the arguments; float64 starts from the same weights as float32. The global random
    generator is not changed.
    """
    network = _find(name, norm)
    _check_input(name, network, input_shape, classes)
    # Only the CPU's generator is forked and seeded: torch.manual_seed would seed those of GPUs as well.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return network.build(input_shape, classes, norm).to(dtype)


def check_module(model: object) -> nn.Module:
    """Return the model if it is an nn.Module with weights on the CPU and without hooks on them.

    An nn.Sequential must have layers.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}, but it must be a torch.nn.Module.")
    if isinstance(model, nn.Sequential) and len(model) == 0:
        raise ModelError("the model is an nn.Sequential without layers: give it at least one.")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"the model's {name} has no shape yet, because its layer is lazy: run a batch through it first."
            )
        if tensor.device.type != "cpu":
            raise ModelError(
                f"the model's {name} is on the device '{tensor.device}', but training starts on the CPU: "
                f"{_ON_THE_CPU.get(tensor.device.type, 'call model.cpu() first')}."
            )
    if hooked := hooked_parameter(model):
        raise ModelError(
            f"the model's {hooked} has a hook on its gradient, which is lost in copies of the model: remove the "
            "hook, or change the gradient in a torch.autograd.Function of the forward."
        )
    return model


def is_sequential(model: nn.Module) -> bool:
    """Return True for a network that runs its children one after another, and can so be cut after each of them.

    Parts of a network do not have its own train() and hooks: with these, it is no plain sequence.
    """
    if not isinstance(model, nn.Sequential) or any(getattr(model, hooks) for hooks in _FORWARD_HOOKS):
        return False
    return type(model).forward is nn.Sequential.forward and type(model).train is nn.Sequential.train


def check_fits(model: nn.Module, inputs: Sequence[int] | InputForm, task: Task) -> None:
    """Raise unless the task's loss takes what the model returns for inputs of this form; the model is not changed.

    With one of several classes for each sample, that is (batch, classes).
    """
    given = InputForm.given(inputs)
    output = example_output(model, given)
    wrong = task.loss.wrong_output(output, task.form, task.classes)
    if wrong is not None:
        maps = f"maps a batch of 2 inputs of {given} to" if isinstance(output, Tensor) else "returns"
        raise ModelError(f"the model {maps} {wrong}.")
    if isinstance(output, Tensor) and output.device.type == "meta":
        return
    checked_total(task.loss, output, task.example(2))


def example_output(model: nn.Module, given: InputForm) -> object:
    """Return what a model returns for two inputs of this form; raise ModelError if it does not take them."""
    if given.names is not None:
        _check_names(model, given.names)
    try:
        return _run_on_example(model, given)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"the model does not take inputs of {given}: {reason}.") from error


def uses_batch_statistics(model: nn.Module) -> bool:
    """Return True if samples of a batch influence each other: gradients then depend on how the batch is cut."""
    is_known = isinstance(model, Line) and model.mixes_samples
    return is_known or any(isinstance(module, _BatchNorm) for module in model.modules())


def uses_dropout(model: nn.Module) -> bool:
    """Return True if a layer has dropout."""
    is_known = isinstance(model, Line) and model.is_random
    return is_known or any(_dropout_rate(module) > 0 for module in model.modules())


def _dropout_rate(module: nn.Module) -> float:
    if isinstance(module, _DropoutNd):
        return module.p
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout
    return 0.0


def _find(name: str, norm: str) -> Network:
    """Return the named network; raise if it or the norm does not exist."""
    if name not in NETWORKS:
        raise ModelError(f"unknown network {name!r}: choose one of {', '.join(NETWORKS)}, or give a factory.")
    if norm not in NORMS:
        raise ModelError(f"unknown norm {norm!r}: choose one of {', '.join(NORMS)}.")
    return NETWORKS[name]


def _check_input(name: str, network: Network, input_shape: InputShape, classes: int) -> None:
    """Raise if the network cannot take such inputs, or there are too few classes."""
    given = "x".join(map(str, input_shape))
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ModelError(f"input shape {given} is not channels x height x width with each at least 1.")
    least = network.min_side
    if min(input_shape[1:]) < least:
        raise ModelError(
            f"an input of {given} is too small for {name}, which needs at least {least}x{least} pixels: "
            "resize the images or choose another network."
        )
    if classes < 2:
        raise ModelError(f"{classes} classes are too few for {name}: at least 2 are needed.")


def _check_names(model: nn.Module, names: Collection[str]) -> None:
    """Raise ModelError unless a forward takes a dictionary with these names."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = {one.name: one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    missing = [name for name, one in named.items() if one.default is one.empty and name not in names]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    unknown = [] if takes_any else [name for name in names if name not in named]
    if missing or unknown:
        wrong = f"there is no {missing[0]!r}" if missing else f"it takes no {unknown[0]!r}"
        raise ModelError(
            f"the samples are dictionaries with {', '.join(names)}, but the model's forward takes "
            f"{', '.join(named) or 'none of them'}: {wrong}. Give the names that it takes."
        )


def _run_on_example(model: nn.Module, form: InputForm) -> object:
    """Return the output for two inputs of this form, with the dtype and torch device of the weights."""
    floating = (parameter for parameter in model.parameters() if parameter.is_floating_point())
    like = next(floating, torch.empty(0))
    with _evaluating(model), torch.no_grad():
        output: object = call(model, form.example(2, like.dtype, like.device))
    return output


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into eval mode, and restore each module's mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
