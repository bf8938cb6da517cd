"""What single keys of the configuration may be: checks that raise ValueError, and the types that use them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from pipar.errors import ConfigError, InputError
from pipar.json_records import is_whole
from pipar.settings.metrics import check_names
from pipar.units import parse_duration, parse_size, split_address

TRACKERS = ("tensorboard", "mlflow", "wandb")
#: Losses of numbers of classes, and of each number of the output.
CLASS_LOSSES = ("cross_entropy", "nll", "next_token")
ELEMENT_LOSSES = ("mse", "l1", "smooth_l1", "bce")
#: More frequent pings would drain a phone's battery and show little more.
_LEAST_KEEPALIVE_S = 1.0
#: The most samples of a batch, and the most devices of a group.
LARGEST_BATCH = 1_000_000
#: No machine has more cores.
MOST_THREADS = 1024
#: The most rounds of a training.
MOST_EPOCHS = 1_000_000_000
#: The most passes over a device's samples in one round.
MOST_LOCAL_EPOCHS = 100_000


def refuse_bool(value: Any) -> Any:
    # TOML's true would pass for the number 1.
    if isinstance(value, bool):
        raise ValueError("is not a number")
    return value


def plan_number(value: Any) -> Any:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError("is neither 'auto' nor a whole number")
    if value != "auto" and value < 1:
        raise ValueError("is less than 1; give a whole number from 1 on, or 'auto'")
    return value


def threads(value: Any) -> Any:
    if value != "auto" and not is_whole(value, 1, MOST_THREADS):
        raise ValueError(f"is not allowed: give a whole number from 1 to {MOST_THREADS}, or 'auto'")
    return value


def drawn(value: Any) -> Any:
    """Return "all", a number of devices, or a share of them."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    is_share = isinstance(value, float) and 0 < value <= 1
    if value != "all" and not is_count and not is_share:
        raise ValueError("is not allowed: give 'all', a number of devices from 1 on, or a share above 0 and up to 1.0")
    return value


def held_out_share(value: Any) -> Any:
    """Return the share of samples that is held out: 0, or between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError("is not allowed: give a share above 0 and below 1, such as 0.2, or 0 for none")
    return float(value)


def shape(value: Any) -> Any:
    sides = list(value) if isinstance(value, list | tuple) else []
    if not sides or not all(isinstance(side, int) and not isinstance(side, bool) and side >= 1 for side in sides):
        raise ValueError("is not the shape of a sample; write its sides, as in [3, 32, 32]")
    return value


def sizes(value: Any) -> Any:
    sizes = value if isinstance(value, list | tuple) else [value]
    if value is not None and not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in sizes):
        raise ValueError("is neither a whole number from 1 on nor a list of them, one for each device")
    return value


def size(value: Any) -> Any:
    """Return a size in bytes, at least 1."""
    if value is None:
        return None
    try:
        size = 0 if isinstance(value, bool) else parse_size(value)
    except (ConfigError, ValueError, OverflowError):  # TOML also has inf and nan
        size = 0
    if size < 1:
        raise ValueError('is not an amount of memory; write a size above 0, as in "1GiB" or "800MB"')
    return size


def cache_size(value: Any) -> Any:
    """Return a size in bytes; "off" is 0."""
    return 0 if value in ("off", 0) and value is not False else size(value)


def duration(value: Any, or_: str = "") -> Any:
    """Return a duration in seconds, at least 0; an error also names the words that are allowed instead."""
    if value is None:
        return None
    try:
        seconds = -1.0 if isinstance(value, bool) else parse_duration(value)
    except (ConfigError, ValueError, OverflowError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        words = f", or {or_}" if or_ else ""
        raise ValueError(f'is not a duration; write a number with its unit, as in "30s" or "500ms"{words}')
    return seconds


def chosen_duration(value: Any) -> Any:
    """Return a duration in seconds, or "auto"."""
    return value if value == "auto" else duration(value, or_="auto")


def deadline(value: Any) -> Any:
    """Return a duration in seconds, "auto", or "off", which is also what None means."""
    if value is None or value == "off":
        return "off"
    return value if value == "auto" else duration(value, or_="auto or off")


def keepalive(value: Any) -> Any:
    seconds = chosen_duration(value)
    if seconds is None or (seconds != "auto" and seconds < _LEAST_KEEPALIVE_S):
        raise ValueError(
            f"is not allowed: peers are pinged at most every {_LEAST_KEEPALIVE_S:g} s; the default is auto"
        )
    return seconds


def address(value: str) -> str:
    try:
        split_address(value)
    except InputError:
        raise ValueError("is not allowed: write HOST:PORT with a port from 0 to 65535, as in 127.0.0.1:50051") from None
    return value


def torch_device(value: str) -> str:
    """Return the name of a device of torch; whether it is there is known only on its machine."""
    if re.fullmatch(r"[a-z]+(:\d+)?", value) is None:
        raise ValueError("is not a device of torch: write auto, cpu, cuda, cuda:1 for the second one, mps or xpu")
    return value


def trackers(value: Any) -> Any:
    """Return the names of known trackers, each once."""
    if not isinstance(value, list | tuple):
        raise ValueError(f'is not a list; write the names of trackers, as in ["{TRACKERS[0]}"]')
    unknown = [name for name in value if name not in TRACKERS]
    if unknown:
        raise ValueError(f"names {unknown[0]!r}, which is not a tracker; there are {', '.join(TRACKERS)}")
    return tuple(dict.fromkeys(value))


def allow(value: Any) -> Any:
    """Return the names of devices, or the path of a file that has them."""
    if value is None or (isinstance(value, str) and value):
        return value
    if not isinstance(value, list | tuple) or not value or not all(isinstance(name, str) and name for name in value):
        raise ValueError(
            'is not allowed: write the names of devices, as in ["pi-1", "pi-2"], or a file with one name per line'
        )
    return tuple(dict.fromkeys(value))


def module_paths(value: Any) -> Any:
    """Return the paths of modules."""
    is_list = isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value)
    if value is not None and not is_list:
        raise ValueError(
            'is not a list of module paths; write them in order of execution, as in ["layer1", "layer2.0"]'
        )
    return value


def loss(value: Any) -> Any:
    """Return the name of a loss, or "package.module:function"."""
    if value in (*CLASS_LOSSES, *ELEMENT_LOSSES) or (isinstance(value, str) and ":" in value):
        return value
    known = ", ".join((*CLASS_LOSSES, *ELEMENT_LOSSES))
    raise ValueError(f"is not a loss; there are {known}, or write a function of your own as package.module:function")


def metrics(value: Any) -> Any:
    """Return the names of metrics, each once."""
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError('is not a list of metrics; write their names, as in ["f1", "auroc"]')
    check_names(value)
    return tuple(value)


def weights(value: Any) -> Any:
    """Return one weight for each class."""
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if value is None or (is_list and all(is_weight(one) for one in value) and any(value)):
        return value
    raise ValueError(
        "is not a list of weights; write a number from 0 on for each class, as in [1.0, 6.5], or remove the key "
        "for none"
    )


def is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def table(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError("is not allowed: write [server.aggregation] with the aggregator's parameters below it")
    for key, parameter in value.items():
        if not isinstance(parameter, bool | int | float | str | list | dict):  # in Python, anything can be given
            raise ValueError(f"has a {type(parameter).__name__} for {key!r}, which a configuration file cannot contain")
    return value


def named(letters: str) -> Callable[[str], str]:
    """Return a check that a name has only letters, digits and these characters, because it names files and folders."""
    pattern = re.compile(f"[A-Za-z0-9][A-Za-z0-9{re.escape(letters)}]*")

    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            signs = " ".join(letters)
            raise ValueError(f"is not allowed: a name starts with a letter or a digit and has only those and {signs}")
        return value

    return check


Positive = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1)]
#: The most devices, or samples in a batch: more could not be simulated in reasonable time.
UpToAMillion = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=LARGEST_BATCH)]
NotNegative = Annotated[int, BeforeValidator(refuse_bool), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(refuse_bool), Field(gt=0, allow_inf_nan=False)]
Momentum = Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, lt=1)]
Decay = Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, allow_inf_nan=False)]
Epochs = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=MOST_EPOCHS)]
LocalEpochs = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=MOST_LOCAL_EPOCHS)]
Probability = Annotated[float, BeforeValidator(refuse_bool), Field(gt=0, lt=1)]
Share = Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, le=1)]
PlanNumber = Annotated[Literal["auto"] | int, BeforeValidator(plan_number)]
Threads = Annotated[Literal["auto"] | int, BeforeValidator(threads)]
