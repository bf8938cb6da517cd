"""The processes of a run: their environment, the cause of a failure, and that all of them end."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from support.training import Case, make_job
from support.waiting import PATIENCE_S, until

import pipar
from pipar.errors import CredentialError, DataError, InputError, LinkError, ProtocolError, TrainingError
from pipar.events import EpochResult, Event, Left, Listening, Pictured, Refused, ignore
from pipar.execution.spans import Span
from pipar.job.job import Job
from pipar.job.plans import Rehearse
from pipar.launch.child_processes import ChildProcesses, EventSender, Failure, GracefulTermination, TimelineRows
from pipar.launch.processes import plans_for_profiles
from pipar.methods import Plan
from pipar.profiling.profile import Profile
from pipar.transport.credentials import new_token
from pipar.transport.grpc_connect import connect
from pipar.transport.tls import DeviceSecurity

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("measured_at_once")]


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# --- their environment


def send_environment(sender: EventSender) -> None:
    sender.send(Listening(json.dumps([str(Path.cwd()), os.environ.get("PIPAR_DATA"), sys.path])))


@pytest.mark.parametrize("data", ["/one", "/other", None])
def test_a_process_has_the_folder_path_and_variables_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str | None
) -> None:
    if data is None:
        monkeypatch.delenv("PIPAR_DATA", raising=False)
    else:
        monkeypatch.setenv("PIPAR_DATA", data)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(tmp_path)])
    processes = ChildProcesses(ignore)
    processes.start("one", send_environment)
    assert json.loads(processes.wait_for_server()) == [str(tmp_path), data, sys.path]
    processes.end()


# --- events


def picture(epoch: int) -> Pictured:
    """Return a picture that is larger than a pipe's buffer."""
    spans = [Span("phone", "compute", "fc", epoch, at, 1, at + 0.25, at + 0.5, at % 2 == 0, "") for at in range(6000)]
    return Pictured(epoch, tuple(spans), is_whole=False, left_out=7)


def test_a_training_does_not_wait_for_its_pictures_and_drops_those_that_would_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    sender = EventSender(theirs)
    monkeypatch.setattr(sender, "_end", lambda: None)  # if this test fails, the others still run
    for event in (picture(1), Left("phone-1"), picture(2), Left("phone-2")):
        sender.observe(event)
    # All were accepted, although nothing was received yet and the sending thread is blocked.
    first, *others = [ours.recv() for _ in range(3)]
    assert isinstance(first, TimelineRows)
    assert first.to_event() == picture(1)
    assert others == [Left("phone-1"), Left("phone-2")]
    sender.observe(picture(3))
    assert ours.recv().epoch == 3
    sender.finish()
    ours.close()


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_process_without_events_ends_when_its_parent_is_gone(
    monkeypatch: pytest.MonkeyPatch, is_finished: bool
) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    ended = SimpleQueue[tuple[int, int]]()
    monkeypatch.setattr(os, "kill", lambda *words: ended.put(words))
    before = set(threading.enumerate())
    sender = EventSender(theirs)
    (watching,) = [thread for thread in set(threading.enumerate()) - before if thread.name == "parent watcher"]
    if is_finished:
        sender.finish()
    assert ended.empty()
    ours.close()
    watching.join(PATIENCE_S)
    assert not watching.is_alive()
    assert ended.qsize() == (0 if is_finished else 1)
    if not is_finished:
        assert ended.get() == (os.getpid(), signal.SIGTERM)


# --- the cause of a failure


def say(sender: EventSender, failure: Failure, after_s: float) -> None:
    time.sleep(after_s)
    sender.send(failure)
    sys.exit(1)


OWN = Failure.of(RuntimeError("out of memory"))
INPUT = Failure.of(DataError("There is no data."))
LOST = Failure.of(TrainingError("phone was lost."))
HEARD = Failure.of(LinkError("The server is gone."))


@pytest.mark.parametrize(
    ("server", "phone", "tablet", "error", "sentence"),
    [
        (LOST, INPUT, HEARD, InputError, "There is no data."),
        (LOST, OWN, HEARD, TrainingError, "RuntimeError: out of memory"),
        (LOST, HEARD, HEARD, TrainingError, "phone was lost."),
        (LOST, Failure.of(ProtocolError("No model.")), HEARD, TrainingError, "No model."),
    ],
)
def test_of_several_failures_the_one_nearest_to_the_cause_is_raised(
    server: Failure,
    phone: Failure,
    tablet: Failure,
    error: type[Exception],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A busy machine may start one process long after another.
    monkeypatch.setattr("pipar.launch.child_processes._COLLECT_FAILURES_S", PATIENCE_S)
    processes = ChildProcesses(ignore)
    for name, failure, after_s in (("server", server, 0.2), ("phone", phone, 0.3), ("tablet", tablet, 0.0)):
        processes.start(name, say, failure, after_s)
    with pytest.raises(error, match=sentence):
        processes.wait_for_end()
    processes.end()


# --- profiles of devices


def test_the_plans_stay_unless_a_device_sends_another_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(Case("pipar", (2,), (3,)).workload())
    again = {name: Profile.from_json(profile.to_json()) for name, profile in job.device_profiles.items()}
    assert plans_for_profiles(job, again) is job.plans
    assert plans_for_profiles(job, {}) is job.plans
    planned_for: list[Job] = []

    def plan(for_job: Job, rehearse: Rehearse) -> dict[str, Plan]:  # noqa: ARG001
        planned_for.append(for_job)
        return {}

    monkeypatch.setattr("pipar.launch.processes.make_plans", plan)
    slower = {name: replace(profile, machine="slower") for name, profile in again.items() if name != "phone-b"}
    assert plans_for_profiles(job, slower) == {}
    found = planned_for[0].device_profiles
    assert {name: profile.machine for name, profile in found.items()} == {
        "phone-a": "slower", "phone-b": job.device_profiles["phone-b"].machine, "phone-c": "slower",
    }  # fmt: skip


# --- SIGTERM


def test_sigterm_cancels_a_coroutine_and_is_remembered_afterwards() -> None:
    ended = []

    async def main() -> None:
        signal.raise_signal(signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("sleep")

    before = signal.getsignal(signal.SIGTERM)
    try:
        termination = GracefulTermination()
        assert not termination.requested()
        termination.run(main())
        assert ended == ["sleep"]
        signal.raise_signal(signal.SIGTERM)  # would end this process
        assert termination.requested()
    finally:
        signal.signal(signal.SIGTERM, before)


# --- whole runs

FACTORIES = """
import multiprocessing, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from pipar.errors import DataError

def network():
    torch.manual_seed(7)  # whatever the seed of the run is
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 2))

def data(name):
    process = multiprocessing.current_process().name
    if name == process == "phone-2" and Path("damaged").exists():
        raise DataError("The data of phone-2 is damaged.")
    if name == "test" and process == "server" and Path("slow").exists():
        Path("testing").touch()
        time.sleep(2)
        Path("survived").touch()
    # All samples are the same, so that their order makes no difference.
    return TensorDataset(torch.ones(20, 1, 4, 4), torch.zeros(20, dtype=torch.int64))
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A training of two devices by factories in the current directory."""
    module = f"factories_of_{abs(hash(tmp_path))}"  # its own: Python imports a name once
    (tmp_path / f"{module}.py").write_text(FACTORIES, "utf-8")
    monkeypatch.chdir(tmp_path)
    return {
        "run": {"name": "it", "epochs": 2, "batch_size": 10},
        "model": {"factory": f"{module}:network"},
        "data": {"factory": f"{module}:data", "classes": 2},
        "plan": {"split_point": 2, "micro_batches": 2},
        "server": {"cores": 1},
        "devices": [{"name": "phone", "count": 2, "link": "unlimited", "speed": 1.0}],
    }


def test_a_run_fails_with_the_error_of_the_device_with_bad_data(tree: dict[str, Any], tmp_path: Path) -> None:
    Path("damaged").touch()
    with pytest.raises(InputError, match=r"^The data of phone-2 is damaged\.$"):
        pipar.run(tree)
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(("method", "split_point"), [("sfl2", 1), ("sfl2", 2), ("fl", 3)])
def test_dropout_in_processes_depends_on_the_seed_alone(tree: dict[str, Any], method: str, split_point: int) -> None:
    tree["run"]["method"] = method  # with sfl2, devices take turns at the server's generator
    tree["plan"] = {"split_point": split_point}
    hashes = [pipar.run(tree, settings=[f"run.seed={seed}"]).content["weights_sha256"] for seed in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_ctrl_c_in_the_final_test_of_real_processes_keeps_the_training(tree: dict[str, Any], tmp_path: Path) -> None:
    Path("slow").touch()
    folder = tmp_path / "runs" / "it"

    def interrupt() -> None:
        while not Path("testing").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        pipar.run(tree)
    result = json.loads((folder / "result.json").read_text("utf-8"))
    assert (len(result["epochs"]), result["test_accuracy"]) == (2, None)
    assert Path("survived").exists()  # the server was asked to end and ended by itself
    assert {"trace.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_device_that_is_killed_ends_the_run_with_its_name_and_nothing_is_left(
    tmp_path: Path, tree: dict[str, Any]
) -> None:
    pids: dict[str, int] = {}

    def kill_one(event: Event) -> None:
        if isinstance(event, EpochResult) and not pids:
            pids.update({process.name: process.pid or 0 for process in multiprocessing.active_children()})
            os.kill(pids["phone-2"], signal.SIGKILL)

    with pytest.raises(TrainingError, match="phone-2"):
        pipar.run(tree, settings=["run.epochs=1000", "devices.link=4g"], observe=kill_one)
    assert {"server", "phone-1", "phone-2"} <= pids.keys()
    result = json.loads((tmp_path / "runs" / "it" / "result.json").read_text("utf-8"))
    assert 1 <= len(result["epochs"]) < 1000
    # The fork server reaps its children with some delay.
    until(lambda: not any(map(is_alive, pids.values())), "all processes to be gone")


def test_a_device_with_a_profile_of_its_first_layers_takes_part(tmp_path: Path) -> None:
    job = make_job(Case("pipar").workload())
    profile = job.server_profile
    prefix = replace(profile, layers=profile.layers[:2], total_layers=len(profile.layers))
    for name, one in (("whole", profile), ("prefix", prefix)):
        one.save(tmp_path / f"{name}.json")
    config = Case("pipar", epochs=1, even=True).tree()
    config["server"] = {"profile": str(tmp_path / "whole.json"), "cores": 2}
    for device in config["devices"]:
        device |= {"profile": str(tmp_path / "prefix.json"), "split_point": "auto", "micro_batches": 2}
    result = pipar.run(config)
    assert {plan["split_point"] for plan in result.content["plans"]} <= {1, 2}
    assert len(result.epochs) == 1


# --- other users of the machine


def join_uninvited(address: str, token: str | None) -> LinkError:
    """Return the error of a program that connects to the server of a run."""

    async def main() -> LinkError:
        with pytest.raises(LinkError) as refused:
            await connect(address, security=DeviceSecurity(token=token), timeout_s=PATIENCE_S)
        return refused.value

    return asyncio.run(main())


def shown_of_processes() -> str:
    """Return the command lines and variables of the processes of this run."""
    shown = []
    for process in multiprocessing.active_children():
        with suppress(OSError):  # it has just ended
            shown += [Path(f"/proc/{process.pid}/{file}").read_text("utf-8") for file in ("cmdline", "environ")]
    return "".join(shown)


def test_only_the_devices_of_a_run_can_join_it(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[str] = []
    seen: list[Event] = []
    errors: list[LinkError] = []
    shown: list[str] = []

    def remembered() -> str:
        tokens.append(new_token())
        return tokens[-1]

    def disturb(event: Event) -> None:
        seen.append(event)
        if isinstance(event, Listening):  # before any device of the run has started
            errors.extend(join_uninvited(event.address, token) for token in (None, new_token()))
        if isinstance(event, EpochResult):
            shown.append(shown_of_processes())

    undisturbed = pipar.run(tree).content["weights_sha256"]
    monkeypatch.setattr("pipar.launch.processes.new_token", remembered)
    result = pipar.run(tree, observe=disturb)
    assert result.content["weights_sha256"] == undisturbed
    assert [type(error) for error in errors] == [CredentialError] * 2
    refused = [event for event in seen if isinstance(event, Refused)]
    assert [event.device for event in refused] == ["a device at 127.0.0.1"] * 2
    shown += [path.read_text("utf-8", "replace") for path in result.folder.rglob("*") if path.is_file()]
    assert len(set(tokens)) == 2
    assert not any(token in text for token in tokens for text in shown)
