"""The files in deploy/ agree with the documents, and are valid for systemd, Docker and the configuration."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections import defaultdict
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args

import pytest
from support.credentials import Folder
from support.waiting import PATIENCE_S

from pipar.cli import main
from pipar.events import EpochResult, Event
from pipar.launch.deployed_device import DeviceOptions, device_workload
from pipar.launch.deployed_server import ServerOptions
from pipar.monitoring.logs import level_of
from pipar.monitoring.metrics import Monitor
from pipar.settings.config import Config, device_names
from pipar.settings.config_file import load_config
from pipar.transport import open_files
from pipar.transport.limits import Limits
from pipar.transport.tls import DeviceSecurity, ServerSecurity

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCUMENT = (ROOT / "docs" / "reference" / "deployment.md").read_text("utf-8")
LOGS = (ROOT / "docs" / "reference" / "logs.md").read_text("utf-8")
UNITS = ["pipar-server.service", "pipar-device@.service"]
IMAGES = ["Dockerfile.server", "Dockerfile.device"]
COMMANDS = ["server", "device"]

Unit = dict[str, dict[str, list[str]]]


def unit(name: str) -> Unit:
    """Return section, key and all values of a unit file; a key may occur several times."""
    found: Unit = defaultdict(lambda: defaultdict(list))
    section = ""
    for line in (DEPLOY / name).read_text("utf-8").splitlines():
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            section = heading[1]
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert section, line
            assert equals, line
            found[section][key].append(value)
    return found


# --- systemd


@pytest.mark.parametrize("name", UNITS)
def test_units_stop_restart_and_are_hardened(name: str) -> None:
    service = {key: values[-1] for key, values in unit(name)["Service"].items()}
    wanted = {
        "User": "pipar",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "PrivateDevices": "yes",
        "CapabilityBoundingSet": "",
        "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
        "SystemCallFilter": "@system-service",
        "Restart": "on-failure",
        "RestartPreventExitStatus": "2",
        "SuccessExitStatus": "130",
        "KillSignal": "SIGTERM",
        "StateDirectory": "pipar",
        "UMask": "0077",
    }
    assert {key: service.get(key) for key in wanted} == wanted
    assert 10 <= int(service["TimeoutStopSec"]) <= 300
    # With a limit on restarts, whatever fails for ten minutes would end the fleet.
    assert unit(name)["Unit"]["StartLimitIntervalSec"] == ["0"]
    assert 1 <= int(service["RestartSec"]) <= 60
    assert unit(name)["Install"]["WantedBy"] == ["multi-user.target"]


def test_the_server_may_open_a_file_for_each_connection_and_its_own() -> None:
    files = int(unit("pipar-server.service")["Service"]["LimitNOFILE"][0])
    assert open_files.most_connections(Limits().connections, files) == Limits().connections
    assert f"--ulimit nofile={files} " in (DEPLOY / "README.md").read_text("utf-8")


@pytest.mark.parametrize("name", UNITS)
def test_all_units_have_the_same_hardening(name: str) -> None:
    # So that a fix in one of them is not forgotten in the other.
    keys = ("Protect", "Private", "Restrict", "SystemCall", "Capability", "Ambient", "NoNew", "Lock")
    hardening = [
        {key: value for key, value in unit(one)["Service"].items() if key.startswith(keys)} for one in (name, UNITS[0])
    ]
    assert hardening[0] == hardening[1]


@pytest.mark.parametrize("name", UNITS)
def test_variables_of_the_command_have_defaults(name: str) -> None:
    service = unit(name)["Service"]
    set_here = {value.partition("=")[0] for value in service["Environment"]}
    assert set(re.findall(r"\$\{?(\w+)", service["ExecStart"][0])) <= set_here
    assert all(value.startswith("-") for value in service["EnvironmentFile"])  # the file is optional


def test_nothing_listens_beyond_loopback_by_default() -> None:
    environment = dict(value.split("=", 1) for value in unit(UNITS[0])["Service"]["Environment"])
    assert environment["PIPAR_LISTEN"].startswith("127.0.0.1:")
    assert environment["PIPAR_METRICS"].startswith("127.0.0.1:")


@pytest.mark.parametrize("name", UNITS)
def test_systemd_understands_the_units(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    program = tmp_path / "pipar"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = (DEPLOY / name).read_text("utf-8").replace("/opt/pipar/bin/pipar", str(program))
    (tmp_path / name).write_text(text)
    instance = tmp_path / name.replace("@.", "@pi-1.")
    command = ["systemd-analyze", "verify", "--man=no", str(instance)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    # It exits with 0 even if it ignores unknown settings, but prints a warning.
    assert (done.returncode, done.stderr) == (0, "")


# --- commands


def documented(command: str) -> set[str]:
    """Return the options of a command in the document's listing."""
    (line,) = re.findall(rf"^pipar {command} CONFIG (.*)$", DOCUMENT, re.MULTILINE)
    return set(re.findall(r"--[\w-]+", line)) | {"--log-format"}


@pytest.mark.parametrize(("name", "command"), list(zip(UNITS, COMMANDS, strict=True)))
def test_options_of_units_are_documented(name: str, command: str) -> None:
    words = shlex.split(unit(name)["Service"]["ExecStart"][0])
    assert words[:3] == ["/opt/pipar/bin/pipar", command, f"/etc/pipar/{command}.toml"]
    assert {word for word in words if word.startswith("--")} <= documented(command)


def command_of(name: str, command: str) -> list[str]:
    """Return the command of a unit or an image on a machine that was set up by the steps: device pi-1 or the server."""
    if name in IMAGES:
        found = dict(instructions(name))
        words = [*json.loads(found["ENTRYPOINT"]), *json.loads(found.get("CMD", "[]"))]
        return words + (["--server", "training.example.org:50051", "--name", "pi-1"] if command == "device" else [])
    service = unit(name)["Service"]
    steps = re.findall(r"^echo '(\w+=\S+)' > /etc/pipar/\w+.env$", (DEPLOY / "README.md").read_text("utf-8"), re.M)
    assert len(steps) == 2
    values = dict(one.split("=", 1) for one in (*service["Environment"], *steps))
    line = re.sub(r"\$\{?(\w+)\}?", lambda found: values[found[1]], service["ExecStart"][0])
    return shlex.split(line.replace("%i", "pi-1").replace("%E", "/etc").replace("%S", "/var/lib"))


@pytest.mark.parametrize(("name", "command"), [*zip(UNITS, COMMANDS, strict=True), *zip(IMAGES, COMMANDS, strict=True)])
def test_commands_of_units_and_images_find_certificates_and_samples(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond loopback, as in the steps; every error that a command finds before it listens or connects is checked."""
    folder = Folder.make(tmp_path / "certs").path
    given: list[tuple[Config, ServerOptions | DeviceOptions]] = []

    def take(config: Config, options: ServerOptions | DeviceOptions, _: object) -> int:
        given.append((config, options))
        return 0

    monkeypatch.setattr("pipar.launch.deployed_server.serve", take)
    monkeypatch.setattr("pipar.launch.deployed_device.take_part", take)
    _, *words = command_of(name, command)
    places = {"/etc/pipar/certs": str(folder), f"/etc/pipar/{command}.toml": str(DEPLOY / f"{command}.toml")}
    with pytest.raises(SystemExit) as ended:
        main([places.get(word, word).replace("127.0.0.1:9090", "127.0.0.1:0") for word in words])
    assert ended.value.code == 0
    ((config, options),) = given
    if isinstance(options, ServerOptions):
        assert options.listen == "0.0.0.0:50051"
        assert options.security == ServerSecurity.from_folder(folder)
    else:
        assert options.server == "training.example.org:50051"
        assert options.security == DeviceSecurity.from_folder(folder, "pi-1")
        assert len(device_workload(config, options).samples.keep_only_shard("pi-1")) > 0


def test_units_are_named_by_their_device() -> None:
    assert "--name %i" in unit("pipar-device@.service")["Service"]["ExecStart"][0]


# --- configurations


def test_the_examples_are_configurations_that_fit_each_other() -> None:
    server, device = (load_config(DEPLOY / f"{name}.toml") for name in COMMANDS)
    assert (server.model, server.data.name) == (device.model, device.data.name)
    assert device_names(server) == device_names(device) == [f"pi-{number}" for number in range(1, 6)]


@pytest.mark.parametrize("name", COMMANDS)
def test_real_devices_are_not_slowed_down(name: str) -> None:
    (group,) = load_config(DEPLOY / f"{name}.toml").devices
    assert (group.speed, group.link.up_bps, group.link.down_bps) == (1.0, None, None)


@pytest.mark.parametrize("name", COMMANDS)
def test_commented_out_keys_are_valid_too(name: str, tmp_path: Path) -> None:
    text = (DEPLOY / f"{name}.toml").read_text("utf-8")
    everything = re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)
    assert len(tomllib.loads(everything)["server"]) > len(tomllib.loads(text)["server"])
    (tmp_path / "everything.toml").write_text(everything)
    load_config(tmp_path / "everything.toml")


# --- images


def instructions(name: str) -> list[tuple[str, str]]:
    text = (DEPLOY / name).read_text("utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in lines if line]


@pytest.mark.parametrize("name", IMAGES)
def test_images_run_as_an_ordinary_user_and_stop_as_asked(name: str) -> None:
    found = dict(instructions(name))
    assert [rest.split()[0] for word, rest in instructions(name) if word == "FROM"] == ["python:3.11-slim"] * 2
    assert (found["USER"], found["STOPSIGNAL"]) == ("pipar", "SIGTERM")


@pytest.mark.parametrize("name", IMAGES)
def test_torch_comes_from_its_cpu_builds_alone(name: str) -> None:
    (index,) = [rest for word, rest in instructions(name) if word == "ARG"]
    assert index == "TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    first, second = [rest for word, rest in instructions(name) if word == "RUN" and "pip install" in rest]
    assert '--index-url "$TORCH_INDEX" -c constraints.txt torch' in first
    assert second.endswith("-c constraints.txt .")


@pytest.mark.parametrize(("name", "command"), list(zip(IMAGES, COMMANDS, strict=True)))
def test_options_of_images_are_documented(name: str, command: str) -> None:
    found = dict(instructions(name))
    words = json.loads(found["ENTRYPOINT"]) + json.loads(found.get("CMD", "[]"))
    assert words[:3] == ["pipar", command, f"/etc/pipar/{command}.toml"]
    assert {word for word in words if word.startswith("--")} <= documented(command)


@pytest.mark.parametrize("name", IMAGES)
def test_files_that_images_copy_exist_and_are_not_ignored(name: str) -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")]
    copied = [rest.split()[:-1] for word, rest in instructions(name) if word == "COPY" and "--from" not in rest]
    sources = [source for rest in copied for source in rest]
    assert "src" in sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert [source for source in sources if not any(fnmatch(source, pattern) for pattern in allowed)] == []


# --- documents


def test_links_of_the_steps_are_not_broken() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", (DEPLOY / "README.md").read_text("utf-8"))
    assert [target for target in targets if not (DEPLOY / target).exists()] == []
    assert {target for target in targets if "/" not in target} == {
        path.name for path in DEPLOY.iterdir() if path.name != "README.md"
    }


def test_every_metric_is_documented_with_its_kind() -> None:
    families = [family for family in Monitor().metrics.registry.collect() if family.name.startswith("pipar_")]
    known = {family.name + ("_total" if family.type == "counter" else ""): family.type for family in families}
    assert dict(re.findall(r"^\| `(pipar_\w+)` \| (\w+) \|", DOCUMENT, re.MULTILINE)) == known


def test_every_event_is_documented_with_its_level_and_fields() -> None:
    rows = {
        name: (level, told) for name, level, told in re.findall(r"^\| `([A-Z]\w+)` \| (\w+) \| (.*) \|$", LOGS, re.M)
    }
    kinds = {kind.__name__: kind for kind in get_args(Event)}
    assert set(rows) == set(kinds)
    for name, (level, told) in rows.items():
        event = kinds[name].__new__(kinds[name])  # only its kind decides
        assert level == {10: "debug", 20: "info", 30: "warning", 40: "error"}[level_of(event)]
        if kinds[name] is not EpochResult:
            assert told.split(", ") == [field.name for field in fields(kinds[name])]


def test_no_path_of_a_single_machine_is_named() -> None:
    places = re.compile(r"(?<![\w.~$])/(?:home|root|Users|work|workspace|mnt)/\w")
    assert [path.name for path in DEPLOY.iterdir() if places.search(path.read_text("utf-8"))] == []
