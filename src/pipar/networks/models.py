"""The six networks of the paper by name, and the checks of a user's own network."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from pipar.cutting.custom_backward import hooked_parameter
from pipar.cutting.cut_check import dtype_of
from pipar.cutting.forward_effects import ForwardEffects, effects_of
from pipar.cutting.stage_line import Line
from pipar.errors import ModelError, describe
from pipar.networks.blocks import NORMS
from pipar.networks.mobilenet import mobilenetv3_large, mobilenetv3_small
from pipar.networks.resnet import resnet18, resnet101
from pipar.networks.vgg import vgg5, vgg16
from pipar.tasks.losses import checked_total
from pipar.tasks.task import Task
from pipar.tensors.inputs import InputForm, Inputs, call, drawn_like, in_dtype

InputShape = tuple[int, int, int]


#: What to do about weights on other devices.
_ON_THE_CPU = {"meta": "build it with values, outside of torch.device('meta')"}

#: Where modules come from that do only what their class says.
_KNOWN_PACKAGES = ("torch", "pipar")

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
    if isinstance(model, type):
        raise ModelError(
            f"the model is the class {model.__name__}, but it must be a torch.nn.Module: pass an instance."
        )
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is of type {type(model).__name__}, but it must be a torch.nn.Module.")
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
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"the model's state_dict() has {name!r}, a {type(value).__name__}, but only tensors can be averaged: "
                "remove get_extra_state() from the module, or keep its state in buffers."
            )
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ModelError("the model has a module of torch.jit, which cannot be copied: use the module without jit.")
    if hooked := hooked_parameter(model):
        raise ModelError(
            f"the model's {hooked} has a hook on its gradient, which is lost in copies of the model: remove the "
            "hook, or change the gradient in a torch.autograd.Function of the forward."
        )
    return model


def copy_of(model: nn.Module) -> nn.Module:
    """Return a copy of a network with its weights; raise ModelError if it cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied, which training needs: {describe(error)}."
        ) from error


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


def check_step(model: nn.Module, form: InputForm, task: Task) -> None:
    """Raise ModelError if a training step on three samples fails, in the forward or in the backward pass.

    A network that takes two, as `check_fits` tries, may take no other number.
    """
    copied = copy.deepcopy(model).train()
    inputs = in_dtype(drawn_like(form.example(2, dtype_of(model)), 3, seed=0), dtype_of(model))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.autograd.backward(task.share(call(copied, inputs), task.example(3), 3.0))
    except Exception as error:
        cause = describe(error).partition(" Hint: ")[0].rstrip(".")
        raise ModelError(f"the model cannot be trained, because a step on three samples fails: {cause}.") from error


def example_output(model: nn.Module, given: InputForm) -> object:
    """Return what a model returns for two inputs of this form; raise ModelError if it does not take them."""
    if given.names is not None:
        _check_names(model, given.names)
    try:
        return _run_on_example(model, given)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        values = f" The values of {given.ranges} may be beyond its embedding." if _is_out_of_range(error, given) else ""
        raise ModelError(f"the model does not take inputs of {given}: {reason}.{values}") from error


def _is_out_of_range(error: Exception, given: InputForm) -> bool:
    return isinstance(error, IndexError) and bool(given.ranges)


def uses_batch_statistics(model: nn.Module) -> bool:
    """Return True if samples of a batch influence each other: gradients then depend on how the batch is cut."""
    return _effects(model).mixes_samples or any(isinstance(module, _BatchNorm) for module in model.modules())


def uses_dropout(model: nn.Module) -> bool:
    """Return True if a layer has dropout."""
    return _effects(model).is_random or any(_dropout_rate(module) > 0 for module in model.modules())


def counts_forwards(model: nn.Module) -> bool:
    """Return True if each forward changes a buffer, or decides by values: N of them are not one of the whole batch."""
    return _effects(model).counts_forwards


def hides_effects(model: nn.Sequential, example: Inputs) -> bool:
    """Return True if a sequence does what cannot be told from the classes of its modules."""
    if all(map(is_known, model.modules())):
        return False
    effects = effects_of(model, example)
    shown = ForwardEffects(uses_batch_statistics(model), uses_dropout(model))
    return effects not in (shown, ForwardEffects())


def is_known(module: nn.Module) -> bool:
    """Return True for a module that does what its class says; another one with buffers may write to them.

    An embedding with a largest norm writes to its weights, and a hook may do anything.
    """
    if getattr(module, "max_norm", None) or any(getattr(module, hooks) for hooks in _FORWARD_HOOKS):
        return False
    is_of_torch = type(module).__module__.partition(".")[0] in _KNOWN_PACKAGES
    return is_of_torch and (isinstance(module, _BatchNorm) or not any(True for _ in module.buffers(recurse=False)))


def _effects(model: nn.Module) -> ForwardEffects:
    return model.effects if isinstance(model, Line) else ForwardEffects()


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
    # Of a copy: a forward may change buffers and weights, in eval mode, too.
    copied = copy_of(model.whole if isinstance(model, Line) else model).eval()
    with torch.no_grad():
        output: object = call(copied, form.example(2, like.dtype, like.device))
    return output
