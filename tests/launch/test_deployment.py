"""`pipar server` and `pipar device` as real processes that crash, are stopped, are late and are refused."""

from __future__ import annotations

import gzip
import json
import signal
import struct
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.deployments import check_nothing_is_left, check_weights, counted, final_model, recomputed, training
from support.programs import Place, address_of, place
from support.training import EXACT, largest_error
from support.waiting import PATIENCE_S, until

from pipar.launch.deployed_server import reason_finished
from pipar.launch.replay import replay
from pipar.recording.flight import Flight
from pipar.settings.config_file import config_from
from pipar.storage.checkpoint import VERSION

pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path, profiles: Path) -> Iterator[Place]:
    with place(tmp_path, profiles, training()) as made:
        yield made


# --- crashes


def check_a_newer_checkpoint_is_refused_and_stays(here: Place) -> None:
    """Check that a server refuses a checkpoint of another version, as after a downgrade, and changes no file."""
    *_, newest = sorted((here.run_folder / "checkpoint").glob("*.pipar"))
    whole = newest.read_bytes()
    newest.write_bytes(whole[:8] + struct.pack("<I", VERSION + 1) + whole[12:])
    before = {path.name: path.read_bytes() for path in newest.parent.iterdir()}
    refused = here.server("--resume")
    assert refused.ends() == 2
    assert f"has format version {VERSION + 1}" in refused.lines()[-1]
    assert {path.name: path.read_bytes() for path in newest.parent.iterdir()} == before
    newest.write_bytes(whole)


def test_a_crash_loses_the_round_of_the_crashed_program_and_nothing_else(here: Place) -> None:
    tree = training(epochs=8)
    tree["server"]["min_devices"] = 2
    here.write(tree)
    server = here.server()
    address = address_of(server)
    here.hold("pi-1"), here.hold("pi-2")
    first, second = here.device("pi-1", address), here.device("pi-2", address)
    here.wait_until_held("pi-1"), here.wait_until_held("pi-2")

    second.kill()  # in mid-epoch
    server.says("pi-2 (lost its connection|is lost)")
    here.let_go("pi-2")
    again = here.device("pi-2", address)
    server.says("pi-2 joined", times=2)
    here.let_go("pi-1")
    again.says("pi-2 finished its part of round", times=1)

    here.hold("server")
    here.wait_until_held("server")
    server.says(r"round \d+ saved")
    server.kill()  # in mid-epoch, too
    before = here.rounds()  # the last saved round may not have its line yet
    here.let_go("server"), here.hold("pi-1")
    check_a_newer_checkpoint_is_refused_and_stays(here)
    server = here.server("--resume", listen=address)
    assert int(server.says(r"resuming after round (\d+)")[1]) in (len(before), len(before) + 1)
    here.wait_until_held("pi-1")  # found the server by itself
    late = here.device("pi-3", address)
    server.says("pi-3 joined")
    here.let_go("pi-1")

    assert [program.ends() for program in (server, first, again, late)] == [0, 0, 0, 0]
    assert here.rounds()[: len(before)] == before
    assert any("pi-2" in round_ for round_ in counted(here)[1:])
    assert "pi-3" not in counted(here)[0]
    assert "pi-3" in counted(here)[-1]
    check_weights(here, tree)
    check_nothing_is_left(here)


def test_a_recorded_deployment_is_replayed_with_its_killed_device(here: Place) -> None:
    tree = training(epochs=3)
    tree["server"]["min_devices"] = 2
    here.write(tree)
    server = here.server("--record")
    address = address_of(server)
    here.hold("pi-2")
    first, second = here.device("pi-1", address), here.device("pi-2", address)
    here.wait_until_held("pi-2")
    second.kill()  # in mid-epoch, and its place is kept for two seconds
    third = here.device("pi-3", address)
    assert [program.ends() for program in (server, first, third)] == [0, 0, 0]

    flight = Flight.read(here.run_folder / "flight.jsonl.zst")
    assert [one.number for one in flight.rounds] == [1, 2, 3]
    assert [(e.what, e.device) for e in flight.events if e.what in ("Lost", "Dropped")] == [
        ("Lost", "pi-2"),
        ("Dropped", "pi-2"),
    ]
    replayed = replay(flight).results
    assert flight.rounds[0].seconds > 1.9
    assert replayed[1].seconds > 1.9
    assert replayed[2].devices == replayed[3].devices == 2


def test_a_second_server_in_the_same_folder_is_refused_and_the_first_trains_on(here: Place) -> None:
    here.finalizes = True
    tree = training(epochs=3)
    here.write(tree)
    here.hold("pi-1")
    server = here.server()
    first = here.device("pi-1", address_of(server))
    here.wait_until_held("pi-1")
    for words in ((), ("--resume",)):
        other = here.server(*words)
        assert other.ends() == 2
        assert f"is in use by process {server.pid} on" in other.lines()[-1]
    here.let_go("pi-1")
    assert (server.ends(), first.ends()) == (0, 0)
    check_weights(here, tree)
    check_nothing_is_left(here)


def test_a_server_that_crashes_while_plans_are_chosen_leaves_no_process(here: Place) -> None:
    tree = training(epochs=10_000)
    tree["plan"] = {}
    links = {"cycle": [{"up": "1Mbit/s", "down": "1Mbit/s"}, {"up": "9Mbit/s", "down": "9Mbit/s"}], "every": "500ms"}
    tree["devices"] = [{"name": "pi", "count": 1, "link": links, "speed": 0.1}]
    tree["data"]["samples_per_device"] = 40
    here.write(tree)
    server = here.server()
    address = address_of(server)
    device = here.device("pi", address)
    until(lambda: any("pipar.planner.search_worker" in line for line in here.alive()), "plans to be chosen")
    server.kill()
    until(lambda: here.alive() == ["pi"], "the process that chooses plans to end")
    device.signal(signal.SIGTERM)
    assert device.ends() == 0


# --- signals


def test_signals_save_the_training_and_it_continues_when_all_are_back(here: Place) -> None:
    tree = training(epochs=12)
    here.write(tree)
    server = here.server()
    address = address_of(server)
    here.hold("pi-1"), here.hold("pi-2")
    second = here.device("pi-2", address)
    here.wait_until_held("pi-2")
    first = here.device("pi-1", address)
    server.says("pi-1 joined")  # for round 2
    here.let_go("pi-2")
    here.wait_until_held("pi-1")
    second.says("finished its part of round 2")  # it waits for pi-1 now, and is held in round 3
    here.hold("pi-2")
    first.signal(signal.SIGTERM)
    here.let_go("pi-1")
    assert first.ends() == 0
    assert first.lines()[-1].endswith("stopping: This device was asked to stop.")
    server.says(r"pi-1 is lost: it ended its session \(it was asked to stop\)")

    here.wait_until_held("pi-2")
    server.signal(signal.SIGTERM)
    assert server.ends() == 0
    server.says("stopping")
    server.says("pi-2 was dismissed: The server stops for now")
    assert "pi-2 is lost" not in server.text()
    assert "joined" not in server.text().partition("stopping")[2]  # again, before there is another server
    saved = here.rounds()
    assert here.result()["rounds"] == saved
    assert set(here.result()) >= {"weights_sha256", "epochs"}
    expected = recomputed(tree, saved)
    assert largest_error({name: final_model(here)[name] for name in expected}, expected) < EXACT
    here.let_go("pi-2")
    second.says(f"the server at {address} is stopping; attempt 1")

    here.hold("pi-2")
    server = here.server("--resume", listen=address)
    here.wait_until_held("pi-2")
    server.signal(signal.SIGINT)
    assert server.ends() == 130
    here.let_go("pi-2")

    here.hold("pi-2"), here.hold("pi-1")
    server = here.server("--resume", listen=address)
    first = here.device("pi-1", address)
    server.says("pi-1 joined"), server.says("pi-2 joined")
    here.let_go("pi-2")
    here.wait_until_held("pi-1")
    first.signal(signal.SIGINT)
    here.let_go("pi-1")
    assert first.ends() == 130
    assert (server.ends(), second.ends()) == (0, 0)
    check_weights(here, tree)
    check_nothing_is_left(here)


def test_a_program_that_is_stopped_while_it_measures_its_machine_ends_in_order(here: Place) -> None:
    here.environment["XDG_CACHE_HOME"] = str(here.folder / "nothing is measured")
    here.hold("server")
    server = here.server()
    here.wait_until_held("server")
    server.signal(signal.SIGTERM)
    here.let_go("server")
    assert server.ends() == 0
    assert server.lines()[-1].endswith("stopping: It was asked to stop.")
    assert here.alive() == []


def test_a_finished_training_does_not_continue_when_its_machine_starts_again() -> None:
    config = config_from({"run": {"epochs": 6, "patience": 2}})
    assert reason_finished(config, [3.0, 2.0, 2.5, 2.5]) is None
    assert "has not improved for 2 rounds" in (reason_finished(config, [3.0, 2.0, 2.5, 2.5, 1.0]) or "")
    assert reason_finished(config_from({"run": {"epochs": 6}}), [3.0, 2.0, 2.5, 2.5, 1.0]) is None
    assert "All 6 rounds are trained" in (reason_finished(config, [6.0, 5.0, 4.0, None, 3.0, 2.0]) or "")


# --- which devices may take part


def write_mnist(folder: Path, samples: int) -> None:
    """Write a folder in the layout of MNIST's publisher, with images of noise."""
    raw, noise = folder / "MNIST" / "raw", np.random.default_rng(0)
    raw.mkdir(parents=True)
    for part, count in (("train", samples), ("t10k", 20)):
        pixels, labels = (noise.integers(0, end, size, np.uint8) for end, size in ((256, count * 784), (10, count)))
        head = struct.pack(">IIII", 0x803, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + pixels.tobytes()))
        (raw / f"{part}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(struct.pack(">II", 0x801, count) + labels.tobytes())
        )


def test_devices_with_their_own_data_train_with_a_server_that_has_none(here: Place) -> None:
    tree = training(epochs=2)
    tree["data"] = {"name": "mnist", "validation": 5, "test": 5}
    tree["server"]["min_devices"] = 2
    here.environment["PIPAR_DATA"] = str(here.folder / "nothing")
    here.write(tree)
    for name, samples in (("listed", 30), ("stranger", 25)):
        write_mnist(here.folder / name, samples)
    server = here.server()
    address = address_of(server)
    devices = [here.device("pi-1", address, "--data", "listed"), here.device("nobody", address, "--data", "stranger")]
    assert [program.ends() for program in (server, *devices)] == [0, 0, 0]
    assert [entry["counted"] for entry in here.rounds()] == [{"nobody": 25, "pi-1": 30}] * 2
    assert here.result()["test_accuracy"] is None
    outlook = json.loads((here.run_folder / "outlook.json").read_text())
    has_doubled = any(one["change"] == "twice the bandwidth" for one in outlook["changes"])
    assert has_doubled != ("to measure the links" in outlook["note"])
    homeless = here.device("nobody", address)
    assert homeless.ends() == 2
    assert "'nobody' is not in the configuration" in homeless.lines()[-1]


def test_a_device_with_another_network_is_refused_in_one_sentence_and_the_others_train(here: Place) -> None:
    tree = training()
    here.write(
        {**tree, "model": {"factory": "support.gated:other_network", "dtype": "float64"}, "plan": {}}, "other.toml"
    )
    server = here.server()
    address = address_of(server)
    here.hold("pi-1")
    honest = here.device("pi-1", address)
    here.wait_until_held("pi-1")
    other = here.device("pi-2", address, config="other.toml")
    assert other.ends() == 2
    assert "refused this device" in other.lines()[-1]
    assert "Traceback" not in other.text()
    assert "no connection" not in other.text()
    here.let_go("pi-1")
    assert (server.ends(), honest.ends()) == (0, 0)
    assert counted(here) == [{"pi-1"}] * 6


def test_a_device_gives_up_after_the_configured_time(here: Place) -> None:
    device = here.device("pi-1", "127.0.0.1:9", "--give-up-after", "1s")
    assert device.ends() == 1
    assert device.lines()[-1].startswith("Gave up connecting to 127.0.0.1:9: ")
    assert device.text().count("Gave up") == 1  # the log's line, and the command's


# --- logs, metrics and health


def get(address: str, path: str) -> tuple[int, str]:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=PATIENCE_S) as answer:
        return answer.status, answer.read().decode()


def health_of(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=PATIENCE_S, wait_for_ready=True)
        return int(answer.status)


def test_a_run_can_be_watched_by_logs_metrics_and_health(here: Place) -> None:
    watched = ("--log-format", "json", "--metrics", "127.0.0.1:0")
    server = here.server(*watched)
    address = server.says(r'"address": "([^"]+)"')[1]
    here.hold("pi-1")
    device = here.device("pi-1", address, *watched)
    here.wait_until_held("pi-1")
    for program in (server, device):
        metrics = program.says(r"metrics at http://([0-9.:]+)")[1]
        assert get(metrics, "/healthz") == (200, "ok\n")
        status, text = get(metrics, "/metrics")
        assert status == 200
        assert "\npipar_" in text
    assert "pipar_devices_connected 1.0" in get(server.says(r"metrics at http://([0-9.:]+)")[1], "/metrics")[1]
    assert health_of(address) == health_pb2.HealthCheckResponse.SERVING
    here.let_go("pi-1")
    assert (server.ends(), device.ends()) == (0, 0)
    told = [json.loads(line) for program in (server, device) for line in program.lines()]
    assert all({"time", "level", "message"} <= row.keys() for row in told)
    assert len(server.events("RoundOver")) == len(device.events("Trained")) == 6
