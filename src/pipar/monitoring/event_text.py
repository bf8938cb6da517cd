"""The sentence of each event, for logs, the live page and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipar.errors import one_line
from pipar.events import (
    Away,
    Back,
    Barred,
    BudgetSpent,
    Connected,
    Connecting,
    DevicesEvaluated,
    Drawn,
    Dropped,
    EndedByCallback,
    EpochResult,
    EquivalenceChanged,
    Event,
    Expiring,
    Failed,
    Heard,
    Joined,
    Left,
    Listening,
    Lost,
    MeasuredBusy,
    NotEvaluated,
    NotKept,
    Pictured,
    Preparing,
    Progress,
    Reconnecting,
    Refused,
    Reloaded,
    ReloadFailed,
    ReplanFailed,
    Replanned,
    ReportFailed,
    ReportWritten,
    Resumed,
    RoundOver,
    RoundRestarted,
    Saved,
    SaveFailed,
    Silent,
    Started,
    Starting,
    Stopping,
    TimedByPrograms,
    TimeoutsChosen,
    TrackerFailed,
    Trained,
    Waiting,
    Welcomed,
)
from pipar.methods import Plan
from pipar.settings.wording import equivalence, equivalence_text
from pipar.units import format_bytes, format_percent, format_seconds

#: A shorter wait is not worth a number.
_AT_ONCE_S = 0.05
#: Devices whose spent epsilon is listed in the line of a round, if they differ.
_MOST_EPSILONS = 8
#: Devices whose names are listed in a line.
_MOST_NAMES = 10


class EventDescriber:
    """Describes events in plain English; remembers what a sentence needs to know of earlier events."""

    def __init__(self) -> None:
        self._wanted = 0
        self._counted: dict[int, int] = {}  # devices by epoch, until its result arrives
        self._last_reason = ""  # why there was no connection, as last described

    def sentence(self, event: Event) -> str:
        """Return one line about the event, without control characters: names and reasons may come from a peer."""
        if isinstance(event, Reconnecting):
            return one_line(self._reconnecting(event))
        return one_line(self._about_the_training(event) or _about_devices(event) or _about_the_program(event))

    def remember(self, event: Event) -> None:
        """Remember what later sentences need to know of an event, described or not."""
        if isinstance(event, Started):
            self._wanted = len(event.samples)
        elif isinstance(event, Waiting):
            self._wanted = event.wanted
        elif isinstance(event, RoundOver):
            self._counted[event.epoch] = len(event.counted)
        elif isinstance(event, Reconnecting):
            self._last_reason = event.reason

    def _about_the_training(self, event: Event) -> str:
        match event:
            case Started():
                leakage = f"; {event.leakage}" if event.leakage else ""
                rounds = _count(event.epochs, "round")
                return f"training starts: {event.method}, {rounds}, results in {event.folder}{leakage}"
            case Progress():
                return f"{event.owner}: round {event.epoch}, iteration {event.iteration}{_loss(event.loss)}"
            case RoundOver():
                samples = _count(sum(event.counted.values()), "sample")
                devices = _count(len(event.counted), "device")
                return f"round {event.epoch} finished: {devices}, {samples}{_epsilons(event.epsilon)}{_partly(event)}"
            case Drawn():
                names = ", ".join(event.devices[:_MOST_NAMES]) + (", ..." if len(event.devices) > _MOST_NAMES else "")
                drawn, present = len(event.devices), _count(event.present, "device")
                return f"round {event.epoch}: {drawn} of {present} drawn ({names}); the others are idle"
            case RoundRestarted():
                deadline = "" if event.deadline_s is None else f" with a deadline of {format_seconds(event.deadline_s)}"
                return f"round {event.epoch} restarts{deadline}: no device finished it, and the model is unchanged"
            case BudgetSpent() | EndedByCallback():
                return event.reason
            case EquivalenceChanged():
                text = equivalence_text(
                    {"equivalence": equivalence(event.reasons), "equivalence_reasons": event.reasons}
                )
                return f"after round {event.epoch}, the weights are {text}"
            case EpochResult():
                return self._result(event)
            case Pictured():
                return f"timeline of round {event.epoch}: {_count(len(event.spans), 'span')}"
            case Replanned():
                why = f" ({event.reason})" if event.reason else ""
                return f"new plans from round {event.epoch} on{why}: {_plans(event.plans)}"
            case ReplanFailed():
                return event.reason
            case TimedByPrograms():
                return timed_by_programs_text(event)
            case NotKept():
                return not_kept_text(event)
            case Joined():
                of = f" of {self._wanted}" if self._wanted >= event.devices else ""
                plural = "" if (self._wanted if of else event.devices) == 1 else "s"
                return f"{event.device} joined ({event.devices}{of} device{plural})"
        return ""

    def _reconnecting(self, event: Reconnecting) -> str:
        """Return when the next attempt is made, and why there is no connection if that was not logged before."""
        soon = "at once" if event.wait_s < _AT_ONCE_S else f"in {format_seconds(event.wait_s, 2)}"
        when = f"attempt {event.attempt} {soon}"
        if event.is_on_purpose:
            return f"the server at {event.address} is stopping; {when}"
        if event.attempt > 1 and event.reason == self._last_reason:
            return f"still no connection to {event.address}; {when}"
        return f"no connection to {event.address} ({event.reason}); {when}"

    def _result(self, result: EpochResult) -> str:
        devices = self._counted.pop(result.epoch, None)
        words = [f"result of round {result.epoch}: {result.seconds:.1f} s{_loss(result.train_loss)}"]
        words += [f"validation loss {result.val_loss:.3f}"] if result.val_loss is not None else []
        words += [f"accuracy {format_percent(result.val_accuracy)}%"] if result.val_accuracy is not None else []
        words += [f"{name} {value:.4g}" for name, value in result.val_metrics.items()]
        words += [_on_devices(result.device_metrics)] if result.device_metrics.get("mean") else []
        words += [_count(devices, "device")] if devices is not None else []
        words += [f"{format_bytes(result.bytes_up)} up", f"{format_bytes(result.bytes_down)} down"]
        return ", ".join(words)


def _on_devices(metrics: Mapping[str, Any]) -> str:
    """Return the means over devices, with the worst deciles."""
    worst = metrics["worst_decile"]
    each = (f"{name} {value:.4g} (worst decile {worst[name]:.4g})" for name, value in metrics["mean"].items())
    return f"on devices: {', '.join(each)}"


def _about_devices(event: Event) -> str:
    match event:
        case DevicesEvaluated():
            count = _count(len(event.scores["devices"]), "device")
            shown = f", {_on_devices(event.scores)}" if event.scores["mean"] else ""
            return f"{count} evaluated the final model{shown}"
        case Waiting():
            return f"waiting for devices: {event.present} of {event.wanted} joined"
        case TimeoutsChosen():
            return _timeouts(event)
        case Away():
            return f"{event.device} lost its connection and has {format_seconds(event.seconds_allowed)} to reconnect"
        case Back():
            return f"{event.device} reconnected after {event.away_s:.1f} s"
        case Silent():
            return f"{event.device} has sent nothing for {event.seconds:.1f} s, and the round waits for it"
        case Heard():
            return f"{event.device} responds again after {event.seconds:.1f} s"
        case Lost():
            return f"{event.device} is lost: {event.reason}"
        case Left():
            return f"{event.device} was dismissed: {event.reason}" if event.reason else f"{event.device} left"
        case Dropped():
            return f"round {event.epoch} excludes {event.device}: {event.reason}"
    return ""


def _about_the_program(event: Event) -> str:
    match event:
        case Starting():
            return starting_text(event)
        case Preparing():
            how_far = f"{format_percent(event.share, 0)}%" if event.share else "this takes some seconds"
            return f"{event.what}: {how_far}"
        case Listening():
            most = event.most_connections
            few = "" if most is None else f"; at most {most} connections at a time, by the limit of open files"
            return f"listening on {event.address}{few}"
        case Barred():
            return f"no device can connect: {event.reason}"
        case Expiring() | ReloadFailed() | MeasuredBusy():
            return event.reason
        case Reloaded():
            return event.what
        case Refused():
            return refused_text(event)
        case Saved():
            return f"round {event.epoch} saved in {event.path}"
        case SaveFailed():
            return f"round {event.epoch} could not be saved: {event.reason}"
        case Resumed():
            verb = "is" if event.again == 1 else "are"
            again = f"; {_count(event.again, 'later round')} {verb} trained again" if event.again else ""
            return f"resuming after round {event.epoch}, from its checkpoint{again}"
        case ReportWritten():
            return f"report written to {event.path}"
        case ReportFailed():
            return event.reason
        case Welcomed():
            return f"{event.device} takes part with plan {event.plan}"
        case NotEvaluated():
            return not_evaluated_text(event)
        case Trained():
            samples = f"{_count(event.samples, 'sample')}{_spent(event)}"
            return f"{event.device} finished its part of round {event.epoch}: {samples}"
        case Connecting():
            return f"connecting to {event.address}"
        case Connected():
            return f"connected to {event.address}"
        case TrackerFailed():
            return f"tracker {event.tracker} is off, training continues without it: {event.reason}"
        case Stopping():
            return f"stopping: {event.reason}"
        case Failed():
            return f"failed: {event.reason}"
    return f"{event}"  # an event that this version does not know


def _timeouts(event: TimeoutsChosen) -> str:
    chosen = (
        ("a device without a sign of life is lost after", event.silent_s),
        ("a broken connection may be resumed for", event.resume_s),
        ("a device that does not finish is excluded after", event.limit_s),
    )
    words = [f"{what} {format_seconds(seconds)}" for what, seconds in chosen if seconds is not None]
    return f"timeouts ({event.reason}): {', '.join(words) or 'none'}"


def starting_text(event: Starting) -> str:
    """Return the first line of a command: what it prepares, and the address of the server."""
    where = {"server": f"; will listen on {event.where}", "device": f"; server {event.where}"}
    return f"pipar {event.program}: preparing {event.what}{where.get(event.program, '') if event.where else ''}"


def refused_text(event: Refused) -> str:
    """Return which device was refused, and why."""
    reason = f"{event.reason.rstrip('.')}; it may try again" if event.again else event.reason
    return f"{event.device or 'an unknown device'} was refused: {reason}"


def not_evaluated_text(event: NotEvaluated) -> str:
    """Return which device has no values of a model, and why."""
    return f"{event.device} could not evaluate the model of round {event.epoch}: {event.reason}"


def timed_by_programs_text(event: TimedByPrograms) -> str:
    """Return why a timing-only run takes longer than a simulation."""
    return f"the programs time this training, which takes longer than the simulator, because {event.reason}"


def not_kept_text(event: NotKept) -> str:
    """Return which device sends its activations in every epoch, and why."""
    return (
        f"the activations of {event.device} are the same in every epoch, but are not kept: {event.reason}; for fewer "
        "bytes give a larger server.activation_cache, or TMPDIR on a larger disk"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _partly(event: RoundOver) -> str:
    """Return which excluded devices have trained a shared server-side model (sfl2), if any."""
    if not event.partly:
        return ""
    parts = ", ".join(f"{_count(samples, 'sample')} of {device}" for device, samples in sorted(event.partly.items()))
    return f"; the shared server-side model was also trained on {parts}"


def _epsilons(epsilon: Mapping[str, float]) -> str:
    """Return the epsilon that devices have spent: one number if it is the same for all, else those of the first."""
    by_device = sorted(epsilon.items())
    if len(set(epsilon.values())) <= 1:
        return "".join(f", epsilon {one:.4g}" for _, one in by_device[:1])
    listed = ", ".join(f"{one:.4g} of {device}" for device, one in by_device[:_MOST_EPSILONS])
    more = f" and {len(by_device) - _MOST_EPSILONS} more" if len(by_device) > _MOST_EPSILONS else ""
    return f", epsilon {listed}{more}"


def _spent(event: Trained) -> str:
    """Return the epsilon that a device has spent, and its limit if there is one."""
    if event.epsilon is None:
        return ""
    limit = "" if event.target is None else f" of {event.target:.4g}"
    return f", epsilon {event.epsilon:.4g}{limit} spent"


def _loss(loss: float | None) -> str:
    return "" if loss is None else f", loss {loss:.3f}"


def _plans(plans: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{device} {Plan(**plan)}" for device, plan in sorted(plans.items()))
