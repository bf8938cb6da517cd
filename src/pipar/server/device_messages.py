"""Reads and checks what a device reports about itself in HELLO and about its epochs in END_EPOCH."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipar.errors import ConfigError, OtherNetworkError, ProtocolError, peer_text
from pipar.json_records import is_number, is_whole
from pipar.methods import METHODS
from pipar.privacy.budget import BudgetUse
from pipar.profiling.comparison import NetworkSizes, network_difference
from pipar.profiling.profile import Profile
from pipar.transport.rate_estimate import FrameTimes, read_frame_times, read_traffic
from pipar.transport.shaping import Traffic
from pipar.wire.messages import LABELS, Kind, Message, TargetSize, read_json

#: Sums of squared errors and of squared values of what was encoded lossily; None if all was exact.
SquaredError = tuple[float, float] | None

_LONGEST_NAME = 64
_MOST_SAMPLES = 100_000_000
_MOST_RELEASES = 1_000_000_000
#: Sums of these stay finite.
_LARGEST_SPENT = 1e300
_LARGEST_LOSS = 1e18
_LARGEST_ERROR = 1e100
_MOST_VALUES = 1000
_SAME_NETWORK = "give [model] and [data] of its configuration the same network and samples as in that of the server"


def added_errors(errors: Iterable[SquaredError]) -> SquaredError:
    """Return the sums over all errors that are known."""
    known = [error for error in errors if error is not None]
    return (sum(lost for lost, _ in known), sum(values for _, values in known)) if known else None


@dataclass(frozen=True)
class Expected:
    """What every device of a training has alike."""

    network: Profile | None = None  # its own profile is of this network
    inputs: str = ""  # what a sample is; empty: not known
    targets: TargetSize = LABELS
    method: str = ""  # another one may divide a network otherwise; empty: not known


@dataclass(frozen=True)
class Introduction:
    """What a device reports about itself when it joins; with a credential, its name is the one in the credential."""

    name: str
    samples: int
    profile: Profile | None = None
    spent: BudgetUse = field(default_factory=BudgetUse)  # on all updates that it has sent, also to other servers
    evaluation_samples: int = 0  # that it evaluates models on, and does not train on
    no_evaluation: str = ""  # why it cannot, although it has some
    machine: str = ""  # an identifier that only programs of the same machine share, if it tells one
    answers_probes: bool = False  # which measure its link

    @property
    def threads(self) -> int:
        """How many threads compute one of its stages."""
        return 1 if self.profile is None else self.profile.threads


def read_hello(message: Message, expected: Expected, peer: str | None) -> Introduction:
    """Return a device's introduction, or raise; its name has to match `peer`, the one in its credential."""
    content = read_json(message)
    name, samples = content.get("name"), content.get("samples")
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise ProtocolError(
            f"HELLO gives the name {str(name)[:80]!r}; a name has 1 to {_LONGEST_NAME} characters, all printable."
        )
    if peer is not None and name != peer:
        raise ProtocolError(f"The credential is that of '{peer}', but the device calls itself '{name}'.")
    if not is_whole(samples, 1, _MOST_SAMPLES):
        raise ProtocolError(f"'{name}' reports {_shown(samples)} samples; 1 to {_MOST_SAMPLES} are allowed.")
    kept = content.get("evaluation", 0)
    if not is_whole(kept, 0, _MOST_SAMPLES):
        raise ProtocolError(f"'{name}' reports {_shown(kept)} evaluation samples; 0 to {_MOST_SAMPLES} are allowed.")
    _check_samples(name, content, expected)
    profile = read_profile(content.get("profile"), expected.network, _same_network(content, expected))
    spent = _read_spent(name, content)
    machine = content.get("machine", "")
    if not isinstance(machine, str) or len(machine) > _LONGEST_NAME:
        raise ProtocolError(f"'{name}' gives {_shown(machine)} as its machine; at most {_LONGEST_NAME} characters fit.")
    no_evaluation, probes = peer_text(content.get("no_evaluation", "")), content.get("probes") is True
    return Introduction(name, samples, profile, spent, kept, no_evaluation, machine, probes)


def _check_samples(name: str, content: Mapping[str, Any], expected: Expected) -> None:
    """Raise OtherNetworkError if a device says that its samples or targets are others than the training has."""
    inputs, targets = content.get("inputs"), content.get("target_bytes")
    if inputs is not None and expected.inputs and inputs != expected.inputs:
        raise OtherNetworkError(
            f"'{name}' has samples of {peer_text(inputs)}, but the server expects samples of {expected.inputs}: give "
            "both programs the same kind of data, or correct data.shape or data.inputs of the server."
        )
    if targets is not None and targets != expected.targets.sample_bytes:
        raise OtherNetworkError(
            f"'{name}' sends {_shown(targets)} bytes of targets for each sample, but the server expects "
            f"{expected.targets.sample_bytes}: give both programs the same [task] and data.classes, and targets of the "
            "same shape and dtype."
        )


def _same_network(content: Mapping[str, Any], expected: Expected) -> str:
    """Return what gives a device the network of the server; a method that does not split has other layers."""
    own, wanted = (METHODS.get(str(name)) for name in (content.get("method"), expected.method))
    if own is None or wanted is None or own.splits == wanted.splits:
        return _SAME_NETWORK
    return (
        f"give its configuration run.method = '{wanted.name}' as the server has (its '{own.name}' may divide the same "
        "network into other layers), and [model] and [data] the same network and samples"
    )


def _read_spent(name: str, content: Mapping[str, Any]) -> BudgetUse:
    releases, spent = content.get("releases", 0), content.get("spent", 0.0)
    if not is_whole(releases, 0, _MOST_RELEASES) or type(spent) is not float or not 0 <= spent <= _LARGEST_SPENT:
        raise ProtocolError(
            f"'{name}' reports {str(releases)[:80]} updates at a cost of {str(spent)[:80]}; allowed are 0 to "
            f"{_MOST_RELEASES}, at a cost of 0 to {_LARGEST_SPENT:g}."
        )
    return BudgetUse(releases, spent)


def read_profile(said: Any, network: Profile | None, remedy: str = _SAME_NETWORK) -> Profile | None:
    """Return the profile in a device's hello, if there is one; it has to be of the network that is trained.

    If it is not, the sentence ends with the remedy.
    """
    if said is None:
        return None
    try:
        profile = Profile.from_json(json.dumps(said))
    except (ConfigError, ArithmeticError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ProtocolError(f"The device's profile cannot be used: {peer_text(error)}") from None
    if network is not None:
        why = network_difference(profile, NetworkSizes.of(network))
        if why:
            raise OtherNetworkError(f"The network of the device is {peer_text(f'{profile.model} {why}')}: {remedy}.")
    return profile


def expect(message: Message, kind: Kind, epoch: int) -> None:
    """Raise if a message has another kind or another epoch."""
    if message.kind is not kind or message.epoch != epoch:
        raise ProtocolError(f"{message} arrived instead of {kind.name} of epoch {epoch}.")


@dataclass(frozen=True)
class EvaluationAnswer:
    """The content of SCORES: values on a device's own samples, or why it has none."""

    samples: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    refusal: str = ""


def read_scores(message: Message, samples: int) -> EvaluationAnswer:
    """Return the content of SCORES of a device with this number of evaluation samples, or raise ProtocolError."""
    content = read_json(message)
    if "refusal" in content:
        return EvaluationAnswer(refusal=peer_text(content["refusal"]) or "it refuses")
    values = content.get("values")
    if content.get("samples") != samples or not isinstance(values, dict) or len(values) > _MOST_VALUES:
        raise ProtocolError(f"{message} carries no values on the device's {samples} evaluation samples.")
    for name, value in values.items():
        if type(value) is not float:
            raise ProtocolError(f"{message} carries {_shown(value)} as {_shown(name)}; it has to be a number.")
    accuracy = values.get("accuracy", 0.0)  # a metric of the user's may have any value
    if not 0 <= accuracy <= 1 and not math.isnan(accuracy):
        raise ProtocolError(f"{message} carries an accuracy of {_shown(accuracy)}; it has to be a share.")
    return EvaluationAnswer(samples, {name: _summable(value) for name, value in values.items()})


def _summable(value: float) -> float:
    """Return a number of which sums stay finite, or infinity: a model that has diverged has losses without limit."""
    return value if math.isnan(value) or abs(value) <= _LARGEST_SPENT else math.copysign(math.inf, value)


@dataclass(frozen=True)
class EndOfEpoch:
    """The content of END_EPOCH, the paper's 'stop epoch'."""

    samples: int  # that the device trained on
    loss_sum: float | None  # over them, if the device computed it
    uplink: Traffic  # as the device measured it
    error: SquaredError = None  # of its activations
    ready: FrameTimes = field(default_factory=dict)  # when the last frames up were ready to be sent
    came: FrameTimes = field(default_factory=dict)  # when the last frames down arrived


def read_end(message: Message, epoch: int) -> EndOfEpoch:
    """Return the content of END_EPOCH, or raise ProtocolError."""
    expect(message, Kind.END_EPOCH, epoch)
    content = read_json(message)
    samples, loss = content.get("samples"), content.get("loss_sum")
    if not is_whole(samples, 1, _MOST_SAMPLES) or not _is_loss(loss):
        raise ProtocolError(f"{message} carries {_shown(samples)} samples and the loss {_shown(loss)}.")
    uplink = read_traffic(content)
    if uplink is None:
        sent, seconds = _shown(content.get("up_bytes")), _shown(content.get("up_s"))
        raise ProtocolError(f"{message} carries {sent} bytes sent in {seconds} s.")
    ready, came = (read_frame_times(content.get(key, [])) for key in ("ready", "came"))
    if ready is None or came is None:
        raise ProtocolError(f"{message} carries times of frames that cannot be read.")
    return EndOfEpoch(samples, loss, uplink, _read_error(message, content.get("error")), ready, came)


def _is_loss(value: Any) -> bool:
    """Return whether a value may be a loss: none, one in a range, or that of a training that has diverged."""
    return value is None or (type(value) is float and (not math.isfinite(value) or abs(value) <= _LARGEST_LOSS))


def _shown(value: Any) -> str:
    """Return a value of a peer, shortened."""
    return repr(value)[:80]


def _read_error(message: Message, said: Any) -> SquaredError:
    if said is None:
        return None
    are_sums = isinstance(said, list) and all(is_number(one, 0, _LARGEST_ERROR) for one in said)
    if not are_sums or len(said) != 2:
        raise ProtocolError(f"{message} carries {str(said)[:80]!r}, not two sums, as the error of a lossy encoding.")
    return float(said[0]), float(said[1])
