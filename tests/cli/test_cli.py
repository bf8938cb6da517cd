"""The commands as a user types them: help with examples, JSON, tables, Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from rich.console import Console
from support.waiting import PATIENCE_S, until

from pipar.cli import Commands, cli, main
from pipar.cli.tables import comparison_table, result_table
from pipar.job.profiles import profile_key
from pipar.profiling.cache import keep_profile
from pipar.profiling.memory import BASE_BYTES
from pipar.profiling.profile import LayerProfile, Profile
from pipar.settings.config import Config
from pipar.settings.config_file import load_config
from pipar.storage.result import Result

COMMANDS = ["", "run", "compare", "plan", "profile", "leakage", "data", "data list", "data get", "certs", "doctor"]
COMMANDS += ["completion"]
COMMANDS += [f"certs {name}" for name in ("init", "server", "issue", "token", "revoke")]
SMALL = ["--devices", "2", "--epochs", "1", "--set", "data.samples_per_device=20", "--set", "run.batch_size=10"]

RESULT = {
    *("method", "model", "dataset", "world", "equivalence", "seed", "plans", "epochs"),
    *("test_accuracy", "weights_sha256", "versions", "command"),
}
EPOCH = {
    *("epoch", "seconds", "samples", "train_loss", "val_loss", "val_accuracy", "bytes_up", "bytes_down"),
    *("server_idle_s", "device_idle_s", "bound_s", "efficiency", "validation_s"),
}

Pipar = Callable[..., str]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds a made-up profile of VGG-5 on digits in batches of 10: nothing is measured."""
    folder = tmp_path_factory.mktemp("cache")
    layer = LayerProfile("layer", (0.0, 0.01), (0.0, 0.02), output_bytes=32_768, parameter_bytes=4096)
    made = Profile("vgg5", "float32", (1, 10), (layer,) * 5)
    config = load_config(None, ["run.batch_size=10"])
    keep_profile(profile_key(config, (1, 32, 32), 10), made, folder / "pipar" / "profiles")
    return folder


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PIPAR_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "runs"


@pytest.fixture
def pipar(capfd: pytest.CaptureFixture[str]) -> Pipar:
    """Run a command that succeeds, and return what it wrote to standard output."""

    def command(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(words)
        captured = capfd.readouterr()
        assert ended.value.code == 0, captured.err
        return captured.out

    return command


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command: str, pipar: Pipar) -> None:
    text = pipar(*command.split(), "--help")
    assert "Example:\n" in text
    assert f"pipar {command}".strip() in text.partition("Example:")[2]
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", ["run", "compare", "plan", "profile", "leakage", "data list", "data get", "doctor"])
def test_every_command_takes_settings_and_json(command: str, pipar: Pipar) -> None:
    text = pipar(*command.split(), "--help")
    assert "--set SECTION.KEY=VALUE" in text
    assert "--json" in text


def test_a_help_line_gives_the_meaning_the_letter_and_the_default(pipar: Pipar) -> None:
    text = " ".join(pipar("run", "--help").split())
    assert "Micro-batches per batch (the paper's N); 'auto' plans it. [default: auto]" in text
    assert "(the paper's P); 'auto' plans it. [default: auto]" in text
    assert f"[default: {Config().run.epochs}]" in text


@pytest.mark.parametrize("group", [[], ["data"], ["certs"]])
def test_a_group_alone_shows_its_help(group: list[str], pipar: Pipar) -> None:
    assert "Commands:" in pipar(*group)


def test_the_version_is_one_line(pipar: Pipar) -> None:
    assert pipar("--version") == "pipar 0.1.0\n"


@pytest.mark.slow
def test_the_command_line_starts_without_torch_grpc_and_the_like() -> None:
    heavy = ("torch", "grpc", "sklearn", "numpy", "rich", "starlette", "uvicorn")
    script = f"import sys, pipar.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_help_and_version_import_no_command_and_no_configuration() -> None:
    script = """
import sys
from pipar.cli import main
for words in (["--help"], ["--version"]):
    try:
        main(words)
    except SystemExit:
        pass
print([name for name in sys.modules if name.startswith(("pydantic", "torch", "numpy", "rich"))], file=sys.stderr)
print(sorted(name for name in sys.modules if name.startswith("pipar.")), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert "Commands:" in done.stdout
    assert done.stderr == "[]\n['pipar.cli', 'pipar.cli.command_group', 'pipar.errors']\n"


@pytest.mark.parametrize("name", Commands.elsewhere)
def test_the_help_has_the_summary_of_each_command(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name
    assert Commands.elsewhere[name].summary == command.get_short_help_str(limit=80)


@pytest.mark.slow
def test_the_first_line_comes_before_anything_slow() -> None:
    commands = ["run --virtual", "compare --methods fl,pipar", "server --listen 127.0.0.1:0", "run --json"]
    commands += ["plan", "profile"]
    commands += ["device --server 127.0.0.1:9 --name device-1", "server --log-format json --listen 127.0.0.1:50051"]
    script = f"""
import sys
from pipar.cli import main
sys.modules["torch"] = None  # importing it fails
for command in {commands}:
    print("-", flush=True, file=sys.stderr)
    try:
        main(command.split())
    except SystemExit:
        pass
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    lines = [each.split("\n") for each in done.stderr.split("-\n")[1:]]
    run, compare, server, silent, plan, profile, device, logged = lines
    assert run[0] == "pipar run: preparing vgg5 on digits with pipar"
    assert compare[0] == "pipar compare: preparing vgg5 on digits with fl, pipar"
    assert server[0][10:] == "pipar server: preparing vgg5 on digits; will listen on any free port of 127.0.0.1"
    assert "torch" in silent[0]  # a JSON document is the only output
    assert plan[0] == "pipar plan: preparing vgg5 on digits with pipar"
    assert profile[0] == "pipar profile: preparing vgg5 on digits"
    assert device[0][10:] == "pipar device: preparing vgg5 on digits as device-1; server 127.0.0.1:9"
    said = json.loads(logged[0])
    assert (said["event"], said["program"], said["where"]) == ("Starting", "server", "127.0.0.1:50051")
    assert done.stdout == ""


@pytest.mark.slow
def test_the_address_of_the_live_page_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--dashboard", "127.0.0.1:0", "--dashboard-token=correct-horse-battery"]
    with pytest.raises(SystemExit) as ended:
        main(["run", "--timing-only", "--json", *words, *SMALL])
    printed = capfd.readouterr()
    document = json.loads(printed.out)
    assert ended.value.code == 0
    assert re.fullmatch(r"Live page: http://127\.0\.0\.1:\d+/\?token=\.\.\.\n", printed.err)
    assert document["command"].startswith(
        "pipar run --timing-only --json --dashboard 127.0.0.1:0 --dashboard-token=..."
    )


@pytest.mark.slow
def test_a_timing_only_run_is_one_document_and_imports_no_torch(runs: Path) -> None:
    script = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr));"
    script += f"from pipar.cli import main; main({['run', '--timing-only', '--json', *SMALL]})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    document = json.loads(done.stdout)
    assert set(document) >= RESULT | {"folder"}
    assert document["world"] == "timing-only"
    assert done.stderr.split() == ["False"]
    assert Path(document["folder"]).parent == runs


@pytest.mark.slow
def test_a_virtual_run_gives_the_fields_of_a_result(pipar: Pipar, runs: Path) -> None:
    document = json.loads(pipar("run", "--virtual", "--json", "--name", "42", "--method", "sfl", *SMALL))
    assert set(document) >= RESULT | {"folder"}
    assert [set(epoch) >= EPOCH for epoch in document["epochs"]] == [True]
    assert (document["method"], document["world"], document["epochs"][0]["samples"]) == ("sfl", "virtual", 40)
    assert Path(document["folder"]) == runs / "42"
    assert json.loads((runs / "42" / "result.json").read_text("utf-8")).items() <= document.items()
    assert document["command"].startswith("pipar run --virtual --json --name 42")


@pytest.mark.slow
def test_a_run_ends_with_a_table_that_fits_80_columns(pipar: Pipar, runs: Path) -> None:
    text = pipar("run", "--timing-only", "--name", "mine", *SMALL)
    words = " ".join(text.split())
    assert "2 devices, link 10/25 Mbit/s, speed 0.05 of this machine" in words
    for row in ("plan P=", "epoch ", "idle server", "sent ", "equivalence exact", "result.json"):
        assert row in words
    assert str(runs / "mine") in "".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
def test_the_table_of_a_run_has_the_window_of_its_plan(pipar: Pipar) -> None:
    window = ["--set", "plan.schedule=1f1b", "--set", "plan.window=2", "--split-point", "2", "--micro-batches", "5"]
    assert "plan P=2 N=5 1f1b(2)" in " ".join(pipar("run", "--timing-only", *window, *SMALL).split())
    assert "P=2 N=5 1f1b(2)" in " ".join(
        pipar("compare", "--timing-only", "--methods", "pipar", *window, *SMALL).split()
    )


def test_settings_and_short_options_override_the_file(pipar: Pipar, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[run]\nseed = 1\nmethod = "sfl"\n[plan]\nsplit_point = 3\n', "utf-8")
    words = ["run", str(path), "--timing-only", "--json", "--split-point", "2", "--set", "run.seed=5", *SMALL]
    document = json.loads(pipar(*words))
    assert (document["method"], document["seed"], document["plans"][0]["split_point"]) == ("sfl", 5, 2)


@pytest.mark.slow
def test_compare_prints_one_row_per_method_with_the_speed_up_over_fl(pipar: Pipar, runs: Path) -> None:
    text = pipar("compare", "--timing-only", "--methods", "pipar,fl,sl", "--name", "x", *SMALL)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.split()[:1] and "P=" in line}
    assert list(rows) == ["pipar", "fl", "sl"]
    assert rows["fl"][4] == "1.00x"
    assert "vs fl" in text
    assert "speed 0.05 of this machine" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert {folder.name for folder in runs.iterdir()} == {"x-pipar", "x-fl", "x-sl", "x-comparison"}
    assert all(str(folder) in "".join(text.split()) for folder in runs.iterdir())


def _result(folder: Path, method: str, plans: list[dict[str, Any]], seconds: float) -> Result:
    epoch = {"seconds": seconds, "samples": 5e4, "efficiency": 0.75, "server_idle_s": seconds, "device_idle_s": 22.2}
    epoch |= {"bytes_up": 1.2e11, "bytes_down": 9.8e10}
    content = {"method": method, "model": "mobilenetv3_large", "dataset": "tiny_imagenet", "world": "timing-only"}
    content |= {"plans": plans, "replans": [], "epochs": [epoch], "test_accuracy": 0.59, "equivalence": "exact"}
    return Result(folder, content)


def test_tables_of_many_plans_and_large_numbers_break_no_row_at_80_columns(tmp_path: Path) -> None:
    many = [
        {"split_point": 1 + n % 17, "micro_batches": 1 + n % 41, "window": 3 * (n % 2), "up": "sparse-planes"}
        for n in range(300)
    ]
    results = {
        "fl": _result(tmp_path, "fl", [{"split_point": 19, "micro_batches": 1}], 1234.56),
        "pipar": _result(tmp_path, "pipar", many, 123.45),
    }
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(comparison_table(results, Config()))
    console.print(result_table(results["pipar"], Config()))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith(" pipar"))
    assert row.split()[:7] == ["pipar", "P=1-17", "N=1-41", "123.45", "10.00x", "123.45", "22.20"]
    assert row.split()[7:] == ["59.0", "%", "120000", "98000"]
    assert sum(" x P=" in line for line in lines) == 2 * 8
    assert sum("and 292 other plans" in line for line in lines) == 2


def test_a_comparison_of_private_trainings_has_their_epsilon_within_80_columns(tmp_path: Path) -> None:
    plans = [{"split_point": 2, "micro_batches": 11}]
    results = {method: _result(tmp_path, method, plans, 12.5) for method in ("fl", "pipar")}
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(comparison_table(results, Config()))
    assert isinstance(console.file, io.StringIO)
    assert "epsilon" not in console.file.getvalue()
    private = Result(tmp_path, {**results["pipar"].content, "epsilon": 28.43219})
    console.print(comparison_table({"fl": results["fl"], "pipar": private}, Config()))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    fl, pipar = (next(line for line in reversed(lines) if line.startswith(f" {name}")) for name in ("fl", "pipar"))
    assert [row.split()[-5:] for row in (fl, pipar)] == [
        ["59.0", "%", "-", "120000", "98000"],
        ["59.0", "%", "28.432", "120000", "98000"],
    ]


def test_a_comparison_names_the_methods_whose_weights_are_not_exact(tmp_path: Path) -> None:
    plans = [{"split_point": 2, "micro_batches": 11}]
    results = {method: _result(tmp_path, method, plans, 12.5) for method in ("fl", "sfl", "pipar")}
    content = {**results["pipar"].content, "equivalence": "statistical"}
    content["equivalence_reasons"] = ["batch statistics", "dropout"]
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(comparison_table({**results, "pipar": Result(tmp_path, content)}, Config()))
    console.print(result_table(Result(tmp_path, content), Config()))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert "fl, sfl: weights are exact † pipar: weights are statistical: batch statistics, dropout; the" in words
    assert "test accuracy 59.0 % †" in words
    assert "equivalence † statistical: batch statistics, dropout" in words
    rows = {line.split()[0]: line for line in text.splitlines() if " N=" in line}
    assert [name for name, line in rows.items() if "59.0 % †" in line] == ["pipar"]


def test_tables_say_when_the_whole_network_stays_on_the_device(tmp_path: Path) -> None:
    whole = _result(tmp_path, "fl", [{"split_point": 1, "micro_batches": 1}], 12.5)
    uncut = _result(tmp_path, "pipar", [{"split_point": 5, "micro_batches": 1}], 12.5)
    results = {
        "fl": Result(tmp_path, {**whole.content, "layers": 1}),
        "pipar": Result(tmp_path, {**uncut.content, "layers": 5}),
    }
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(comparison_table(results, Config()))
    assert isinstance(console.file, io.StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert any(line.startswith("fl whole network N=1 12.50") for line in lines)
    at = lines.index("pipar: P=5 N=1")
    assert lines[at + 1] == "the whole network on the device: federated learning"


@pytest.mark.slow
def test_compare_without_fl_is_relative_to_the_first_method(pipar: Pipar) -> None:
    assert "vs sfl" in pipar("compare", "--timing-only", "--methods", "sfl,pipar", *SMALL)


@pytest.mark.slow
def test_compare_prints_a_list_of_results_as_json(pipar: Pipar) -> None:
    documents = json.loads(pipar("compare", "--timing-only", "--json", "--methods", "fl,pipar,fl", *SMALL))
    assert [document["method"] for document in documents] == ["fl", "pipar"]
    assert all(set(document) >= RESULT | {"folder"} for document in documents)


@pytest.mark.slow
@pytest.mark.usefixtures("measured_at_once")
def test_profile_shows_every_layer_and_writes_what_can_be_read_back(pipar: Pipar, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    text = pipar("profile", "-o", str(path), "--budget", "0.1", "--set", "run.batch_size=8")
    profile = Profile.load(path)
    assert len(profile.layers) == 5
    assert all(f"{number} {layer.name}" in text for number, layer in enumerate(profile.layers, start=1))
    assert text.count("forward") == text.count("backward") == 5
    assert "s, with 0.1 s for passes over the layers (--budget)." in text
    assert max(map(len, text.splitlines()[:-1])) <= 80


@pytest.mark.slow
@pytest.mark.usefixtures("measured_at_once")
def test_profile_prints_the_profile_itself_as_json(pipar: Pipar) -> None:
    text = pipar("profile", "--json", "--budget", "0.1", "--set", "run.batch_size=8")
    assert Profile.from_json(text).model == "vgg5"


@pytest.mark.slow
@pytest.mark.usefixtures("measured_at_once")
def test_profile_of_a_small_device_has_the_layers_that_fit(pipar: Pipar) -> None:
    memory = f"{BASE_BYTES + 4 * 2**20}B"
    text = pipar("profile", "--json", "--budget", "0.1", "--memory", memory, "--set", "run.batch_size=8")
    profile = Profile.from_json(text)
    assert 1 <= len(profile.layers) < profile.network_layers == 5


def test_data_list_shows_known_datasets_and_where_they_are(pipar: Pipar, tmp_path: Path) -> None:
    text = pipar("data", "list")
    assert all(
        name in text
        for name in ("digits", "mnist", "cifar10", "tiny_imagenet", "built in", "no (170.1 MB to download)")
    )
    assert max(map(len, text.splitlines())) <= 80
    known: list[dict[str, Any]] = json.loads(pipar("data", "list", "--json", "--set", f"data.path={tmp_path}"))
    assert {info["name"]: info["found"] for info in known}["cifar10"] is None


def test_data_get_of_a_built_in_dataset_has_nothing_to_do(pipar: Pipar) -> None:
    assert "built in" in pipar("data", "get", "digits")
    assert json.loads(pipar("data", "get", "digits", "--json")) == {"name": "digits", "folder": None}


def test_a_failure_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(sys.modules["pipar.launch.run"], "run", fail)
    with pytest.raises(SystemExit) as ended:
        main(["run"])
    assert ended.value.code == 1
    _, sentence = capfd.readouterr().err.splitlines()  # after the line about what starts
    assert sentence == "RuntimeError: out of memory (PIPAR_TRACEBACK=1 shows where.)"


@pytest.mark.slow
@pytest.mark.parametrize("world", ["--virtual", "--timing-only"])
def test_ctrl_c_in_virtual_time_saves_the_epochs_so_far(
    world: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from pipar.storage.run_folder import RunFolder

    add = RunFolder.add_epoch

    def add_and_interrupt(folder: RunFolder, *arguments: Any) -> None:
        add(folder, *arguments)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunFolder, "add_epoch", add_and_interrupt)
    with pytest.raises(SystemExit) as ended:
        main(["run", world, "--name", "cut", *SMALL, "--epochs", "3"])
    assert ended.value.code == 130
    assert capfd.readouterr().err.splitlines()[-1] == f"Stopped. Saved in {runs / 'cut'}/."
    result = json.loads((runs / "cut" / "result.json").read_text("utf-8"))
    assert (len(result["epochs"]), result["test_accuracy"]) == (1, None)
    assert (runs / "cut" / "model.safetensors").exists() == (world == "--virtual")


@pytest.mark.slow
def test_ctrl_c_in_the_real_world_saves_the_epochs_so_far(runs: Path) -> None:
    words = ["run", "--name", "cut", "--speed", "1", "--link", "unlimited", *SMALL, "--epochs", "10000"]
    program = subprocess.Popen(
        [sys.executable, "-m", "pipar", *words], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        until((runs / "cut" / "metrics.jsonl").exists, "the first epoch")
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to the children, too
        _, err = program.communicate(timeout=PATIENCE_S)
    finally:
        program.kill()
    assert program.returncode == 130
    assert err.splitlines()[-1] == f"Stopped. Saved in {runs / 'cut'}/."
    assert "Traceback" not in err
    result = json.loads((runs / "cut" / "result.json").read_text("utf-8"))
    assert len(result["epochs"]) >= 1
    assert (runs / "cut" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_run_leaves_no_processes(runs: Path) -> None:
    words = ["run", "--name", "killed", "--speed", "1", "--link", "unlimited", *SMALL, "--epochs", "10000"]
    program = subprocess.Popen(
        [sys.executable, "-m", "pipar", *words], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        until((runs / "killed" / "metrics.jsonl").exists, "the first epoch")
    finally:
        program.kill()
        program.wait()
    until(lambda: not _of_session(program.pid), "its processes to end")


def _of_session(leader: int) -> list[int]:
    """Return the processes of a session that still run."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state != "Z":
                    found.append(int(folder.name))
    return found
