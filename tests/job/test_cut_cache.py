"""A network is recorded once: later starts read its stages from disk, unless anything that matters has changed."""

from __future__ import annotations

import json
import logging
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.networks import Attention, Guarded, Recurrent, Residual, Tied, UNet
from torch import Tensor, nn
from torch.nn import functional as F

from pipar.cutting.graph_data import NotPlainError, graph_from_data, tensor_from_data, tensor_to_data
from pipar.cutting.saved_stages import line_from_data, line_to_data
from pipar.cutting.split import named_layers
from pipar.cutting.stage_line import Line, differs, line_of, whole_line
from pipar.events import Preparing
from pipar.job import user_network
from pipar.job.network_code import network_text
from pipar.job.user_objects import UserObjects
from pipar.job.workload import Workload
from pipar.profiling.cache import keep_text
from pipar.settings.config_file import config_from

EXAMPLE = torch.zeros(2, 1, 4, 4, dtype=torch.float64)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Residual(norm=nn.BatchNorm2d, dropout=0.5),
    "u-net": UNet,
    "attention": Attention,
    "recurrent": Recurrent,
    "tied": Tied,
    "no grad": Guarded,
    "spectral norm": lambda: Guarded(spectral=True),
}
SCALE = 1.0

pytestmark = pytest.mark.usefixtures("one_thread")


class Scaled(nn.Module):
    """It reads a constant of this file, an attribute and a tensor that is no buffer."""

    def __init__(self, factor: float = 1.0, table: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 10)
        self._factor, self.table = factor, torch.full((8,), table, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x.flatten(1))) * self.table + torch.tensor(3.0)) * self._factor * SCALE


class Stopped(nn.Module):
    """It detaches some of its terms: forward passes are the same whichever they are, gradients are not."""

    def __init__(self, stops: tuple[bool, ...] = (True, False)) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(16, 8), nn.ModuleList(map(Term, stops)), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        states = self.first(x.flatten(1))
        for block in self.blocks:
            states = block(states)
        return self.last(states)


class Term(nn.Module):
    def __init__(self, stop: bool) -> None:
        super().__init__()
        self.inner, self.stop = nn.Linear(8, 8), stop

    def forward(self, x: Tensor) -> Tensor:
        term = self.inner(x)
        return F.relu(x + (term.detach() if self.stop else term))


def scaled_by(factor: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    return lambda _module, _given, output: output * factor


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the networks that were recorded."""
    names: list[str] = []

    def counted(network: nn.Module, *rest: Any) -> Line:
        names.append(type(network).__name__)
        return line_of(network, *rest)

    monkeypatch.setattr(user_network, "line_of", counted)
    return names


def built(model: nn.Module, **section: Any) -> Line:
    """Return the line of a network as a new process would make it."""
    data = {"name": "synthetic", "shape": [1, 4, 4], "classes": 10, "samples_per_device": 4}
    config = config_from({"model": {"dtype": "float64", **section}, "data": data})
    line = Workload(config, UserObjects.of(config, model, None, None, None)).build_model()
    assert isinstance(line, Line)
    return line


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_second_start_reads_the_same_stages_and_records_nothing(name: str, recorded: list[str]) -> None:
    first, second = built(NETWORKS[name]()), built(NETWORKS[name]())
    assert len(recorded) == 1
    assert list(named_layers(second)) == list(named_layers(first))
    assert (second.cuts, second.effects) == (first.cuts, first.effects)
    assert not differs(second, EXAMPLE)
    for part, other in zip(first._owned.values(), second._owned.values(), strict=True):
        assert list(part) == list(other)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["nothing", "attribute", "tensor", "constant", "frozen", "tied", "code"])
def test_a_network_that_computes_something_else_is_recorded_again(
    change: str, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built(Scaled())
    other = Scaled(factor=2.0 if change == "attribute" else 1.0, table=2.0 if change == "tensor" else 1.0)
    if change == "constant":
        monkeypatch.setitem(globals(), "SCALE", 2.0)
    if change == "frozen":
        other.first.weight.requires_grad_(False)
    if change == "tied":
        other.first.bias = nn.Parameter(torch.zeros(8))
        other.also = other.first.bias  # type: ignore[assignment]
    if change == "code":
        monkeypatch.setattr(Scaled, "forward", lambda self, x: self.second(self.first(x.flatten(1)).tanh()))
    line = built(other)
    assert len(recorded) == (1 if change == "nothing" else 2)
    assert not differs(line, EXAMPLE)


@pytest.mark.slow
def test_a_network_of_which_only_the_backward_is_another_is_recorded_again(recorded: list[str]) -> None:
    built(Stopped())
    line = built(Stopped((False, True)))
    assert len(recorded) == 2
    assert not differs(line, EXAMPLE)


@pytest.mark.slow
def test_other_cut_points_and_dtypes_have_their_own_stages(recorded: list[str]) -> None:
    built(Residual())
    assert len(built(Residual(), cut_points=["pool"])) == 2
    assert len(built(Residual(), cut_points=["layer1.0"])) == 2
    assert list(named_layers(built(Residual(), cut_points=["pool"]))) == ["pool", "output"]
    built(Residual(), dtype="float32")
    assert len(recorded) == 2


@pytest.mark.slow
def test_stages_that_no_longer_compute_what_the_network_does_are_not_used() -> None:
    data = json.loads(json.dumps(line_to_data(line_of(Scaled().double(), EXAMPLE))))
    assert line_from_data(data, Scaled().double(), EXAMPLE) is not None
    assert line_from_data(data, Scaled(factor=1.01).double(), EXAMPLE) is None
    assert line_from_data(data, Residual().double(), EXAMPLE) is None


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["", "{}", "not json", '{"stages": 3}', None])
def test_a_damaged_file_is_not_used(damage: str | None, recorded: list[str], tmp_path: Path) -> None:
    built(Scaled())
    (file,) = (tmp_path / "pipar" / "profiles").glob("*.cuts.json")
    text = file.read_text("utf-8")
    file.write_text(text.replace("aten.", "evil.") if damage is None else damage, "utf-8")
    assert not differs(built(Scaled()), EXAMPLE)
    assert len(recorded) == 2


@pytest.mark.slow
def test_without_a_folder_to_write_to_a_network_is_recorded_every_time(
    recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    built(Scaled())
    built(Scaled())
    assert len(recorded) == 2


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "aten.add",
        "aten.nothing.here",
        "torch.load",
        "builtins.eval",
        "aten.__class__.__mro__",
        "aten.from_file.default",
        "aten.from_file.out",
        "aten.set_grad_enabled.default",
        "aten._cufft_clear_plan_cache.default",
    ],
)
def test_a_file_can_name_only_operators_of_torch(target: str) -> None:
    nodes = [{"op": "call_function", "name": "x", "target": target, "args": {"tuple": []}, "kwargs": {"dict": []}}]
    with pytest.raises(NotPlainError, match="operator"):
        graph_from_data(nodes)


@pytest.mark.parametrize("op", ["placeholder", "get_attr", "output", "name", "keyword", "argument"])
@pytest.mark.parametrize("text", ["x=print()", 'x"), print(), ("', "x; print()", "None", "x\nprint()"])
def test_a_file_can_put_no_code_into_what_is_compiled(op: str, text: str) -> None:
    node: dict[str, Any] = {"op": "call_function", "name": "x", "target": "aten.zeros.default"}
    node |= {"args": {"tuple": []}, "kwargs": {"dict": []}}
    if op in ("placeholder", "get_attr", "output"):
        node |= {"op": op, "target": text if text != "None" else "None'"}
    elif op == "name":
        node["name"] = text
    else:
        given = {"dict": [[text, 1]]}
        node["kwargs" if op == "keyword" else "args"] = given if op == "keyword" else {"tuple": [given]}
    with pytest.raises(NotPlainError, match="not a name"):
        graph_from_data([node])


@pytest.mark.slow
def test_a_kept_file_with_code_in_it_runs_nothing(tmp_path: Path) -> None:
    data = json.loads(json.dumps(line_to_data(line_of(Scaled().double(), EXAMPLE))))
    first = next(node for node in data["stages"][0]["graph"] if node["op"] == "placeholder")
    first["target"] = f"x=open({str(tmp_path / 'written')!r}, 'w')"
    assert line_from_data(data, Scaled().double(), EXAMPLE) is None
    assert not (tmp_path / "written").exists()


def test_only_the_user_can_write_to_the_folder_of_kept_stages(tmp_path: Path) -> None:
    keep_text({}, "text", "cuts")
    assert (tmp_path / "pipar" / "profiles").stat().st_mode & 0o077 == 0


def test_a_stage_of_the_users_own_modules_is_not_kept() -> None:
    assert line_to_data(whole_line(Scaled().double(), EXAMPLE)) is None


@pytest.mark.parametrize(
    "tensor", [torch.tensor(3.5), torch.arange(6).reshape(2, 3), torch.empty(0, 2), torch.tensor([True, False])]
)
def test_constants_are_the_same_bits_again(tensor: Tensor) -> None:
    again = tensor_from_data(json.loads(json.dumps(tensor_to_data(tensor))))
    assert again.dtype == tensor.dtype
    assert torch.equal(again, tensor)


def test_the_text_of_a_network_does_not_depend_on_its_weights_or_addresses() -> None:
    assert network_text(Scaled()) == network_text(Scaled())
    assert network_text(Scaled()) != network_text(Scaled(2.0))


def test_the_text_of_a_network_says_which_module_has_an_attribute() -> None:
    assert network_text(Stopped((True, False))) != network_text(Stopped((False, True)))


@pytest.mark.parametrize("factors", [(2.0, None), (3.0, 2.0), (2.0, 2.0)])
def test_the_text_of_a_network_says_which_module_has_a_hook(factors: tuple[float | None, ...]) -> None:
    one, other = Scaled(), Scaled()
    for network, given in ((one, (2.0, 3.0)), (other, factors)):
        for layer, factor in zip((network.first, network.second), given, strict=True):
            if factor is not None:
                layer.register_forward_hook(scaled_by(factor))
    assert network_text(one) != network_text(other)


def test_the_text_of_a_network_names_functions_of_torch() -> None:
    one, other = Scaled(), Scaled()
    one.act, other.act = torch.relu, torch.tanh
    assert network_text(one) != network_text(other)


LOGGER = logging.getLogger("a network's own")


class Logged(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        LOGGER.debug("forward of %s", x.shape)
        return super().forward(x)


def test_the_text_of_a_network_does_not_depend_on_what_else_a_process_logs() -> None:
    before = network_text(Logged())
    logging.getLogger("of another library")
    assert network_text(Logged()) == before
    assert len(before) < 500


@pytest.mark.parametrize("folder", ["site-packages", "target", "own"])
def test_the_text_of_a_network_has_the_constants_of_own_code_but_not_of_packages(folder: str, tmp_path: Path) -> None:
    place = tmp_path / folder / "sessions.py"
    if folder == "target":  # of pip install --target
        (tmp_path / folder / "sessions-1.0.dist-info").mkdir(parents=True)
    place.parent.mkdir(exist_ok=True)
    place.write_text("def named(x):\n    return x, SESSION\n", "utf-8")
    texts = []
    for session in ("one", "other"):
        names: dict[str, Any] = {"__name__": "sessions", "SESSION": session}
        exec(compile(place.read_text("utf-8"), str(place), "exec"), names)
        network = Scaled()
        network.hook = names["named"]
        texts.append(network_text(network))
    assert (texts[0] == texts[1]) == (folder != "own")


def test_the_text_of_a_network_has_the_attributes_of_its_settings() -> None:
    one, other = Scaled(), Scaled()
    one.settings, other.settings = types.SimpleNamespace(scale=1.0), types.SimpleNamespace(scale=2.0)
    assert network_text(one) != network_text(other)


@pytest.mark.slow
@pytest.mark.parametrize("names", [None, ["pool"]], ids=["every cut", "named"])
def test_what_is_done_is_told_before_it_is_done(names: list[str] | None) -> None:
    config = config_from({"model": {"cut_points": names}, "data": {"name": "synthetic", "shape": [1, 4, 4]}})
    told: list[Preparing] = []
    workload = Workload(config, UserObjects.of(config, Residual(), None, None, None))
    workload.observe = told.append  # type: ignore[assignment]
    workload.build_model()
    assert told[0].share == 0.0
    assert "Recording the operations of the network" in {event.what for event in told}
    assert [event.share for event in told] == sorted(event.share for event in told)


class _Lazy(dict[str, str]):
    """A dictionary like those of transformers, which import a model when it is looked up."""

    def keys(self) -> Any:
        raise ValueError("could not find it")

    def values(self) -> Any:
        raise ValueError("could not find it")


def test_a_dictionary_that_loads_what_it_has_is_left_alone() -> None:
    class Own(nn.Linear):
        table = _Lazy(a="b")

    assert "Own.table 1 = 'b'" in [line.rpartition("<locals>.")[2] for line in network_text(Own(2, 2))]
