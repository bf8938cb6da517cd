"""`pipar doctor`: each check on made-up machines, and all of them on this one."""

from __future__ import annotations

import json
import socket
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipar.cli import doctor_checks, machine_limits, main
from pipar.cli.doctor_checks import EXTRAS, Finding, TorchFacts
from pipar.cli.machine_limits import Limits
from pipar.data.catalog import known_datasets
from pipar.profiling.profile import LayerProfile, Profile
from pipar.settings.config import Config
from pipar.settings.config_file import config_from
from pipar.transport.addresses import why_not_listening

GIB = 2**30


def _state(finding: Finding) -> tuple[str, bool]:
    return finding.state, bool(finding.advice)


def _group(root: Path, **files: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name.replace("__", ".")).write_text(content + "\n", "utf-8")
    return root


def test_python_must_be_new_enough() -> None:
    assert doctor_checks.check_python((3, 11, 0)) == Finding("Python", "ok", "3.11.0")
    assert _state(doctor_checks.check_python((3, 10, 9))) == ("problem", True)


def test_packages_must_be_installed_and_load() -> None:
    assert doctor_checks.check_packages({"click": "8.1", "torch": "2.4"}, {}).state == "ok"
    missing = doctor_checks.check_packages({"click": None, "torch": "2.4"}, {})
    assert (missing.state, missing.found) == ("problem", "missing: click")
    broken = doctor_checks.check_packages({}, {"grpc": "ImportError: no"})
    assert "grpc does not load: ImportError: no" in broken.found
    assert broken.advice.endswith("pip install --force-reinstall grpcio"), "a package named grpc is another project"
    assert set(doctor_checks.NATIVE_MODULES.values()) <= set(doctor_checks.required_packages())


def test_a_module_that_does_not_load_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise OSError('libgomp.so.1 is missing')", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor_checks.loading_errors(["broken_package", "no_such_package", "json"]) == {
        "broken_package": "OSError: libgomp.so.1 is missing"
    }


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (TorchFacts("2.4", 4, "AVX2", 1.0), "ok"),
        (TorchFacts("2.4", 1, "DEFAULT", 1.0), "advice"),
        (TorchFacts(error="ModuleNotFoundError: No module named 'torch'"), "problem"),
    ],
)
def test_torch_must_load_and_should_have_vector_instructions(facts: TorchFacts, state: str) -> None:
    assert doctor_checks.check_torch(facts).state == state


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"cpu__max": "max 100000", "memory__max": "max"}, Limits()),
        (
            {"cpu__max": "150000 100000", "memory__max": "1073741824", "memory__current": "1024"},
            Limits(1.5, GIB, 1024),
        ),
    ],
)
def test_limits_of_control_groups_of_version_2(tmp_path: Path, files: dict[str, str], found: Limits) -> None:
    root = _group(tmp_path / "cgroup", **files)
    own = tmp_path / "own"
    own.write_text("0::/\n", "utf-8")
    assert machine_limits.limits(root, own) == found


def test_the_tightest_limit_of_a_group_and_its_parents_counts(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    _group(root / "slice", cpu__max="100000 100000", memory__max=str(GIB), memory__current="0")
    _group(root / "slice" / "job", cpu__max="300000 100000", memory__max=str(4 * GIB), memory__current="0")
    own = tmp_path / "own"
    own.write_text("0::/slice/job\n", "utf-8")
    assert machine_limits.limits(root, own) == Limits(1.0, GIB, 0)


def test_limits_of_control_groups_of_version_1(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    _group(root / "cpu", **{"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"})
    _group(root / "cpu" / "job", **{"cpu__cfs_quota_us": "50000", "cpu__cfs_period_us": "100000"})
    _group(root / "memory" / "job", **{"memory__limit_in_bytes": str(GIB), "memory__usage_in_bytes": "1"})
    own = tmp_path / "own"
    own.write_text("4:memory:/job\n1:cpu:/job\n", "utf-8")
    assert machine_limits.limits(root, own) == Limits(0.5, GIB, 1)


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert machine_limits.limits(tmp_path / "none", tmp_path / "neither") == Limits()


def test_a_limit_on_cores_gets_advice() -> None:
    assert doctor_checks.check_cores(8, 8, None) == Finding("cores", "ok", "8")
    assert doctor_checks.check_cores(8, 2, 4.0) == Finding("cores", "ok", "2 of 8")
    limited = doctor_checks.check_cores(8, 8, 1.5)
    assert limited.state == "advice"
    assert "--set server.cores=1" in limited.advice


@pytest.mark.parametrize(
    ("available", "limits", "state"),
    [
        (8 * GIB, Limits(), "ok"),
        (GIB, Limits(), "advice"),
        (GIB // 4, Limits(), "problem"),
        (8 * GIB, Limits(memory_bytes=2 * GIB, memory_used=2 * GIB), "problem"),
        (None, Limits(memory_bytes=4 * GIB, memory_used=0), "ok"),
        (None, Limits(), "ok"),
    ],
)
def test_memory_must_hold_a_process_and_should_hold_several(available: int | None, limits: Limits, state: str) -> None:
    assert doctor_checks.check_memory(available, limits).state == state


def test_available_memory_is_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:     1024 kB\n", "utf-8")
    assert machine_limits.available_memory(tmp_path / "meminfo") == 2**20
    assert machine_limits.available_memory(tmp_path / "none") is None


def test_a_missing_folder_is_judged_by_its_parent(tmp_path: Path) -> None:
    assert doctor_checks.nearest(tmp_path / "a" / "b") == tmp_path
    assert doctor_checks.check_folder("runs", tmp_path / "a" / "b", "PIPAR_RUNS").state in ("ok", "advice")


def test_a_file_in_the_way_of_a_folder_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    found = doctor_checks.check_folder("runs", tmp_path / "file" / "x", "PIPAR_RUNS")
    assert found.state == "problem"
    assert "set PIPAR_RUNS" in found.advice


@pytest.mark.parametrize(("free", "state"), [(2_000_000_000, "ok"), (500_000_000, "advice"), (1000, "problem")])
def test_a_folder_needs_free_space(free: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))
    assert doctor_checks.check_folder("runs", tmp_path, "PIPAR_RUNS").state == state


def _why_not(busy: str) -> Callable[[str], str]:
    return lambda address: "address already in use" if address == busy else ""


def test_the_limit_of_open_files_is_judged_by_the_connections_that_it_leaves() -> None:
    few, many = doctor_checks.check_open_files(1024), doctor_checks.check_open_files(524_288)
    assert (few.state, few.found) == ("advice", "1024 files, a server accepts 768 connections")
    assert "4352" in few.advice
    assert "LimitNOFILE" in few.advice
    assert (many.state, many.found) == ("ok", "524288 files, a server accepts 4096 connections")


def test_loopback_must_work_and_the_servers_port_must_be_free() -> None:
    assert [one.state for one in doctor_checks.check_ports("127.0.0.1:0", _why_not(""))] == ["ok"]
    assert [one.state for one in doctor_checks.check_ports("127.0.0.1:7700", _why_not(""))] == ["ok", "ok"]
    assert [one.state for one in doctor_checks.check_ports("127.0.0.1:7700", _why_not("127.0.0.1:7700"))] == [
        "ok",
        "problem",
    ]
    assert [one.state for one in doctor_checks.check_ports("127.0.0.1:7700", _why_not("127.0.0.1:0"))] == ["problem"]


def test_a_port_in_use_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert why_not_listening(address) == "address already in use"
    assert why_not_listening("no-such-host.invalid:1") == "there is no such host"


def test_the_configured_dataset_must_be_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPAR_DATA", raising=False)
    datasets = known_datasets(tmp_path)
    assert [one.state for one in doctor_checks.check_data(Config(), datasets, tmp_path)] == ["ok"]
    (missing,) = doctor_checks.check_data(config_from({"data": {"name": "cifar10"}}), datasets, tmp_path)
    assert missing.state == "problem"
    assert "pipar data get cifar10" in missing.advice
    own = config_from({"data": {"name": "cifar10", "factory": "a:b"}})
    (unchecked,) = doctor_checks.check_data(own, datasets, tmp_path)
    assert (unchecked.state, unchecked.found[:32]) == ("advice", "data.factory a:b is not checked;")
    monkeypatch.setenv("PIPAR_DATA", str(tmp_path / "typo"))
    assert [one.state for one in doctor_checks.check_data(Config(), datasets, tmp_path / "typo")] == ["advice"]


def test_an_extra_has_its_purpose_and_how_to_install_it() -> None:
    extra = EXTRAS["tensorboard"]
    assert (
        doctor_checks.check_extra("tensorboard", extra, lambda _: "2.20").found
        == "tensorboard 2.20, for --tracker tensorboard"
    )
    absent = doctor_checks.check_extra("tensorboard", extra, lambda _: None)
    assert (absent.state, absent.advice) == ("advice", "To install it: pip install 'pipar[tensorboard]'")


def test_every_extra_of_the_package_is_checked() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"dev", "docs"}


def test_links_are_emulated_without_the_kernel() -> None:
    assert doctor_checks.check_links([], "").state == "ok"
    assert _state(doctor_checks.check_links(["tc"], "")) == ("advice", True)
    assert _state(doctor_checks.check_links([], "operation not permitted")) == ("advice", True)


def test_every_problem_has_one_line_of_advice(tmp_path: Path) -> None:
    """Whatever is wrong: each branch above, once more for its words."""
    found = [
        doctor_checks.check_python((3, 9)),
        doctor_checks.check_packages({"x": None}, {}),
        doctor_checks.check_packages({}, {"x": "no"}),
        doctor_checks.check_torch(TorchFacts(error="no")),
        doctor_checks.check_memory(1, Limits()),
        doctor_checks.check_folder("runs", Path("/dev/null/x"), "PIPAR_RUNS"),
        *doctor_checks.check_ports("127.0.0.1:1", lambda _: "no"),
        *doctor_checks.check_data(config_from({"data": {"name": "mnist"}}), known_datasets(tmp_path), tmp_path),
    ]
    assert {one.state for one in found} == {"problem"}
    assert all(one.advice and "\n" not in one.advice for one in found)


# --- the command


def _examine(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    monkeypatch.setattr(doctor_checks, "examine", lambda _: list(findings))


OK, ADVICE = Finding("cores", "ok", "2"), Finding("wandb", "advice", "not installed", "To install it: pip")
PROBLEM = Finding("torch", "problem", "ModuleNotFoundError: " + "long " * 30, "Install it.")


@pytest.mark.parametrize(("findings", "code"), [((OK, ADVICE), 0), ((OK, PROBLEM), 1)])
def test_the_exit_code_is_0_only_without_problems(
    findings: tuple[Finding, ...], code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _examine(monkeypatch, *findings)
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["doctor"], ["doctor", "--json"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == code
        text = capfd.readouterr().out
        if words[-1] == "--json":
            document = json.loads(text)
            assert document["usable"] is (code == 0)
            assert [row["check"] for row in document["findings"]] == [one.check for one in findings]
        else:
            assert max(map(len, text.splitlines())) <= 80
            assert all(one.advice in text for one in findings)


@pytest.mark.slow
def test_this_machine_is_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    found = doctor_checks.examine(Config())
    assert doctor_checks.is_usable(found), found
    assert {one.check for one in found} >= {
        "Python",
        "packages",
        "torch",
        "cores",
        "memory",
        "open files",
        "runs",
        "profiles",
    }
    assert list(tmp_path.iterdir()) == []


def test_profiles_of_a_busy_machine_are_named(tmp_path: Path) -> None:
    layers = (LayerProfile("one", (0.1,), (0.1,), 4, 4),)
    quiet = Profile("vgg5", "float32", (1,), layers, crowded=(1.2,), crowd=1)
    (tmp_path / "a.json").write_text(quiet.to_json())
    (tmp_path / "old.json").write_text("{}")
    assert doctor_checks.check_profiles(tmp_path) == doctor_checks.check_profiles(tmp_path / "missing") == []
    (tmp_path / "b.json").write_text(replace(quiet, model="resnet18", busy_cores=1.7).to_json())
    (tmp_path / "c.json").write_text(replace(quiet, crowded=(17.8,)).to_json())
    (found,) = doctor_checks.check_profiles(tmp_path)
    assert found.state == "advice"
    assert found.found == (
        "that of resnet18 (b.json) was measured while other programs used 1.7 cores; "
        "that of vgg5 (c.json) has a contention factor of 17.8, and at most 2 is plausible"
    )
    assert "'pipar profile'" in found.advice
