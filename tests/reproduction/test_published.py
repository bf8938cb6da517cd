"""The numbers that are attributed to the paper are in the paper."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

from pipar.errors import InputError
from pipar.profiling.operation_counts import known_counts
from pipar.settings.config import MODELS
from pipar.settings.links import NAMED_LINKS
from reproduction.published import Selection, Statement, published, read_published

BESIDE_THE_PROJECT = Path(__file__).parents[2].parent / "shared" / "paper" / "pipar.tex"
IN_THE_PAPER = {
    "VGG-5": "vgg5", "ResNet-18": "resnet18", "MobileNetV3-Small": "mobilenetv3_small",
    "VGG-16": "vgg16", "ResNet-101": "resnet101", "MobileNetV3-Large": "mobilenetv3_large",
    "MNIST": "mnist", "CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "Tiny ImageNet": "tiny_imagenet",
    "4G": "4g", "4G+": "4g+", "WiFi": "wifi",
}  # fmt: skip


@pytest.fixture(scope="module")
def paper() -> list[str]:
    """The lines of the paper's source: $PIPAR_PAPER, else the one next to the project, else skip."""
    path = Path(os.environ.get("PIPAR_PAPER", BESIDE_THE_PROJECT))
    if not path.is_file():
        pytest.skip(f"no paper at {path}: set PIPAR_PAPER to its LaTeX source to run this test")
    return path.read_text("utf-8").splitlines()


def numbers(text: str) -> set[float]:
    """Every number in a text, with its sign if it has one, and without it: a dash can also mean "to"."""
    found = {match.replace(",", "") for match in re.findall(r"[+-]?\d[\d,]*(?:\.\d+)?", text)}
    return {float(one) for one in found} | {abs(float(one)) for one in found}


# --- compared with the paper itself


def test_every_number_is_on_its_line_of_the_paper(paper: list[str]) -> None:
    wrong = [
        (statement.name, bound)
        for statement in published().statements
        if not statement.in_words
        for bound in (statement.low, statement.high)
        if bound is not None and bound not in numbers(paper[statement.line - 1])
    ]
    assert wrong == []


def cells(line: str) -> list[str]:
    """The cells of a row of a LaTeX table, without the markup that makes one span several rows."""
    return [
        re.sub(r"\\multirow\{\d\}\{\*\}\{(.*)\}", r"\1", cell.strip()) for cell in line.strip().rstrip("\\ ").split("&")
    ]


def table(paper: list[str], label: str) -> Iterator[tuple[int, list[str]]]:
    """The numbered rows of the table with this label."""
    end = paper.index(f"    \\label{{table:{label}}}")
    start = max(n for n in range(end) if "\\begin{table" in paper[n])
    for number in range(start, end):
        if paper[number].rstrip().endswith("\\\\"):
            yield number + 1, cells(paper[number])


@pytest.mark.parametrize(("label", "rows"), [("opt-exp", 18), ("opt-exp-large", 18)])
def test_the_tables_of_parameters_are_complete(paper: list[str], label: str, rows: int) -> None:
    model = dataset = ""
    checked = 0
    for line, row in table(paper, label):
        if len(row) != 12 or row[2] not in IN_THE_PAPER:
            continue
        model, dataset = row[0] or model, row[1] or dataset
        ours = published().selection(IN_THE_PAPER[model], IN_THE_PAPER[dataset], IN_THE_PAPER[row[2]])
        assert ours is not None
        assert (line, [float(cell) for cell in row[3:]]) == (ours.line, printed(ours))
        checked += 1
    assert checked == rows


def printed(row: Selection) -> list[float]:
    chosen = [row.split_point, row.micro_batches, row.epoch_s, row.choosing_s]
    return [*chosen, row.best_split_point, row.best_micro_batches, row.best_epoch_s, row.searching_s, row.printed_score]


@pytest.mark.parametrize(
    ("label", "datasets"), [("acc-small", "mnist cifar10"), ("acc-large", "cifar100 tiny_imagenet")]
)
def test_the_tables_of_accuracies_are_complete(paper: list[str], label: str, datasets: str) -> None:
    rows = {re.sub(r"\W", "", row[0]): row[1:] for _, row in table(paper, label) if len(row) == 7}
    models = rows.pop("")
    for column, name in enumerate(models):
        ours = published().accuracy(IN_THE_PAPER[name], datasets.split()[column // 3])
        assert ours is not None
        assert [float(rows[method][column]) for method in ("FL", "SFL")] == [ours.fl, ours.sfl]
        assert [float(rows[method][column]) for method in ("PiPar", "Delta")] == [ours.pipar, ours.difference]
    assert len(models) == 6


# --- without the paper: numbers in one place follow from those in another


def test_the_sums_over_the_tables_are_those_of_the_text() -> None:
    rows, said = published().selections, published().statement
    assert len(rows) == 36
    assert 100 * mean(row.choosing_s / row.epoch_s for row in rows) == pytest.approx(said("planning-cost").low, abs=0.5)
    ratio = mean(row.searching_s / row.choosing_s for row in rows)
    assert ratio == pytest.approx(said("planning-speed-up").low, abs=0.5)
    assert 100 * mean(row.optimal for row in rows) == pytest.approx(said("optimal-plans").low, abs=0.05)
    assert all(row.split_point == row.best_split_point for row in rows)
    assert min(round(row.score, 2) for row in rows) == said("score").low


def test_all_printed_scores_except_two_follow_from_the_times() -> None:
    other = [
        (row.model, row.dataset, row.link)
        for row in published().selections
        if abs(row.score - row.printed_score) > 0.006
    ]
    assert other == [("vgg16", "tiny_imagenet", "4g"), ("vgg16", "tiny_imagenet", "wifi")]


def test_differences_of_accuracies_are_those_of_the_text() -> None:
    rows = published().accuracies
    assert len(rows) == 12
    for row in rows:
        assert row.pipar - max(row.fl, row.sfl) == pytest.approx(row.difference, abs=0.011)
    said = published().statement("accuracy-difference")
    assert (min(row.difference for row in rows), max(row.difference for row in rows)) == (said.low, said.high)


@pytest.mark.parametrize("link", ["4g", "4g+", "wifi"])
def test_our_links_have_the_printed_rates(link: str) -> None:
    rates = [published().statement(f"{way}-{link}").low for way in ("uplink", "downlink")]
    assert [1e6 * rate for rate in rates if rate is not None] == list(NAMED_LINKS[link])


@pytest.mark.parametrize("model", MODELS)
def test_our_networks_have_the_printed_layers(model: str) -> None:
    counts = known_counts(model, "batch", (3, 32, 32), classes=10)
    assert counts is not None
    assert published().statement(f"layers-{model}").low == len(counts)


# --- asking


def test_a_range_prints_as_in_the_paper() -> None:
    said = published().statement
    assert str(said("speed-up-fl-vgg5")) == "1.4 to 3.4 x"
    assert str(said("server-idle-fl")) == "up to 64.1 x"
    assert str(said("score")) == "at least 0.96"
    assert str(said("planning-cost")) == "27 %"
    assert str(said("curves-overlap")) == "in words"


def test_every_experiment_has_a_statement_of_the_paper() -> None:
    names = [
        "time",
        "idle",
        "convergence",
        "accuracy",
        "selection",
        "batch-size",
        "heterogeneous",
        "privacy",
        "bandwidth",
    ]
    assert {name: bool(published().about(name)) for name in names} == dict.fromkeys(names, True)
    assert published().about("unheard-of") == ()


def test_an_unknown_statement_is_refused() -> None:
    with pytest.raises(InputError, match="'speedup' is not a statement of the paper; choose from devices, "):
        published().statement("speedup")


def test_a_statement_about_methods_names_them() -> None:
    named = [(said, method) for said in published().statements for method in (said.method, said.against) if method]
    assert named
    for said, method in named:
        assert re.search(rf"\b{method}\b", said.what), said.name


# --- strict


STATEMENT = 'name = "a"\nplace = "V"\nline = 1\nwhat = "x"\n'


def file_with(statement: str = STATEMENT + "low = 1", rest: str = "accuracy = []\nselection = []\n") -> str:
    return f"{rest}[[statements.time]]\n{statement}\n"


def test_a_small_file_is_read() -> None:
    (only,) = read_published(file_with()).statements
    assert only == Statement(name="a", experiment="time", place="V", line=1, what="x", low=1.0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (file_with(STATEMENT), "has neither low nor high"),
        (file_with(STATEMENT + "low = 2\nhigh = 1"), "low of 2 above its high of 1"),
        (file_with(STATEMENT + "low = 1\nhihg = 2"), "hihg"),
        (file_with(STATEMENT + 'low = "1"'), "low"),
        (file_with(STATEMENT + "low = nan"), "low"),
        (file_with(STATEMENT + 'low = 1\nmodels = ["vgg6"]'), "models"),
        (file_with(STATEMENT + "low = 1\n[[statements.idle]]\n" + STATEMENT + "low = 2"), "a occurs twice"),
        (file_with(rest="more = 1\naccuracy = []\nselection = []\n"), "more"),
        (file_with(rest="accuracy = []\n"), "selection"),
        (
            file_with(rest='selection = []\naccuracy = [{place = "V", line = 1, rows = [["vgg5", "mnist", 1]]}]\n'),
            "zip",
        ),
        ("name =", "damaged"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as refused:
        read_published(text)
    assert str(refused.value).startswith("The published numbers are damaged")
