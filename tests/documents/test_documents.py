"""The documents agree with the code: keys and defaults, links, commands and examples."""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from pydantic import BaseModel
from support.programs import place

import pipar
from benchmarks.quoted import (
    EXAMPLE_PAGES,
    FOREIGN,
    MEASURED,
    quoted,
    quoted_example,
    quoted_foreign,
    quoted_measured,
)
from docs.reference_pages import cli_page, pages
from pipar.cli import cli
from pipar.events import EpochResult
from pipar.settings.config import Config, DeviceSection
from pipar.settings.config_file import config_from

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README = (ROOT / "README.md").read_text("utf-8")
SECTIONS: dict[str, type[BaseModel]] = {
    name: DeviceSection if name == "devices" else type(getattr(Config(), name)) for name in Config.model_fields
}
NOT_SET = "not set"


def blocks(text: str, language: str) -> list[str]:
    """Return the contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- the configuration


def documented_defaults() -> dict[str, dict[str, str]]:
    """Return the rows of docs/configuration.md: section, key, and the default as written there."""
    text = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    found: dict[str, dict[str, str]] = {}
    for heading, body in re.findall(r"^## \[+(\w+)\]+\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        rows = re.findall(r"^\| `(\w+)` \|.*?\| (?:`([^`]*)`|(not set)) \|", body, re.MULTILINE)
        found[heading] = {key: default or absent for key, default, absent in rows}
    return found


def test_configuration_document_has_every_key_and_no_other() -> None:
    keys = {section: list(written) for section, written in documented_defaults().items()}
    assert keys == {name: list(model.model_fields) for name, model in SECTIONS.items()}


@pytest.mark.parametrize("section", SECTIONS)
def test_configuration_document_has_the_defaults(section: str) -> None:
    written = documented_defaults()[section]
    given = {key: tomllib.loads(f"x = {text}")["x"] for key, text in written.items() if text != NOT_SET}
    model = SECTIONS[section]
    assert {key for key in written if key not in given} == {
        key for key, field in model.model_fields.items() if field.default is None
    }
    assert model.model_validate(given) == model()


def test_configuration_document_names_the_choices() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    for section, model in SECTIONS.items():
        properties = model.model_json_schema()["properties"]
        for key, schema in properties.items():
            row = re.search(rf"^## \[+{section}\]+\n.*?^\| `{key}` \|([^|]*)\|", text, re.MULTILINE | re.DOTALL)
            assert row is not None
            assert [choice for choice in schema.get("enum", []) if f'"{choice}"' not in row[1]] == []


def whole_file() -> str:
    """Return the block with all keys."""
    return blocks((ROOT / "docs" / "configuration.md").read_text("utf-8"), "toml")[-1]


def test_the_file_with_all_keys_has_the_meaning_of_an_empty_one() -> None:
    assert config_from(tomllib.loads(whole_file())) == Config()


def test_the_file_with_all_keys_has_every_key_and_no_other() -> None:
    everything = re.sub(r"^# (?=\w+ = )", "", whole_file(), flags=re.MULTILINE)
    tree: dict[str, Any] = tomllib.loads(everything)
    others = ("factory", "clip_norm")  # not with an optimiser's own arguments, and not with noise
    arguments = {key: value for key, value in tree["optimizer"].items() if key not in others}
    task = {key: value for key, value in tree["task"].items() if key != "count"}  # of a loss of one's own only
    data = {key: value for key, value in tree["data"].items() if key != "inputs"}  # takes the place of a shape
    config_from({**tree, "optimizer": arguments, "task": task, "data": data})
    written = {name: list(tree[name][0] if name == "devices" else tree[name]) for name in tree}
    assert written == {name: list(model.model_fields) for name, model in SECTIONS.items()}


# --- names and links


def found_in_documents(pattern: str) -> list[tuple[Path, Any]]:
    """Return what a pattern finds in every document, each with its document."""
    wanted = re.compile(pattern, re.MULTILINE)
    return [(document, one) for document in DOCUMENTS for one in wanted.findall(document.read_text("utf-8"))]


def test_relative_links_are_not_broken() -> None:
    links = found_in_documents(r"\]\(([^)#]+)(?:#[^)]*)?\)")
    local = [(document, target) for document, target in links if "://" not in target]
    assert len(local) > 100
    assert [link for link in local if not (link[0].parent / link[1]).exists()] == []


def test_named_files_exist() -> None:
    roots = (ROOT, ROOT / "src" / "pipar")
    named = found_in_documents(r"`((?:[\w-]+/)*\w+\.py)`")
    assert [(document, name) for document, name in named if not any((root / name).exists() for root in roots)] == []


def test_named_make_targets_exist() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert [named for named in found_in_documents(r"(?:`|^    )make (\w+)") if named[1] not in targets] == []


def test_named_tests_exist() -> None:
    named = found_in_documents(r"`(tests/[\w/]+\.py)::(\w+)`")
    assert [test for _, (path, test) in named if f"def {test}(" not in (ROOT / path).read_text("utf-8")] == []


def test_every_picture_is_shown_somewhere() -> None:
    shown = {
        name for path in DOCUMENTS for name in re.findall(r"!\[[^]]+\]\(\S*images/(\S+?)\)", path.read_text("utf-8"))
    }
    assert shown == {path.name for path in (ROOT / "docs" / "images").iterdir()}


def test_the_list_of_decisions_links_every_decision() -> None:
    folder = ROOT / "docs" / "decisions"
    decisions = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert re.findall(r"\(([^)]+)\)", (folder / "index.md").read_text("utf-8")) == decisions
    assert [int(name[:3]) for name in decisions] == list(range(1, len(decisions) + 1))


#: Generated or tabular: readers look things up here and do not read them from start to end.
LONG_PAGES = ("cli.md", "python.md", "configuration.md")
MOST_WORDS = 1200


def test_pages_are_short() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    # A word has a letter or a digit: neither the bars of a table nor its rules are words.
    words = {name_of(page): len(re.findall(r"\S*\w\S*", page.read_text("utf-8"))) for page in pages}
    long = [name for name, count in words.items() if count > MOST_WORDS]
    assert [name for name in long if Path(name).name not in LONG_PAGES] == []


def test_the_first_page_and_the_navigation_list_every_page() -> None:
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"index.md"}
    listed = {page for page in pages if not re.match(r"decisions/\d", page)}  # decisions are listed on their own page
    links = re.findall(r"\]\(([^)#:]+\.md)\)", (docs / "index.md").read_text("utf-8"))
    assert listed - set(links) == set()
    navigation = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert listed - {"decisions/index.md"} - set(navigation) == set()


def test_fields_of_an_epoch_are_documented() -> None:
    text = (ROOT / "docs" / "reference" / "epoch.md").read_text("utf-8")
    (section,) = re.findall(r"^## An epoch\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    first_cells = " ".join(re.findall(r"^\| (`[^|]*)\|", section, re.MULTILINE))
    assert re.findall(r"`(\w+)`", first_cells) == [field.name for field in fields(EpochResult)]


@pytest.mark.slow
def test_no_file_names_a_path_of_its_authors_machine() -> None:
    # Folders of one person or one machine, and the path of this clone.
    places = re.compile(r"(?<![\w.~$])/(?:home|root|Users|work|workspace|mnt)/\w|\b[A-Z]:\\")
    suffixes = {".md", ".py", ".toml", ".txt", ".json", ".yml"}
    folders = ("src", "tests", "docs", "examples", "benchmarks", "reproduction", "simulation")
    files = [*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    found = {}
    for path in files:
        if path.is_file() and (path.suffix in suffixes or path.name == "Makefile"):
            text = path.read_text("utf-8")
            if (place := places.search(text)) or str(ROOT) in text:
                found[name_of(path)] = place[0] if place else str(ROOT)
    assert found == {}


@pytest.mark.parametrize("name", ["cli.md", "python.md"])
def test_the_reference_agrees_with_the_code(name: str) -> None:
    written = (ROOT / "docs" / "reference" / name).read_text("utf-8")
    assert written == pages()[name], f"docs/reference/{name} is not up to date: run python -m docs.reference_pages"


def test_the_reference_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    wide = cli_page()
    monkeypatch.setenv("COLUMNS", "40")
    assert cli_page() == wide


# --- commands and examples


def commands() -> list[list[str]]:
    """Return the words after `pipar` of every command in README's code blocks."""
    lines = [line for block in blocks(README, "sh") for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("pipar ")]


def parse(words: list[str]) -> click.Context:
    """Return the context of a command without running it; a mistake is a UsageError."""
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        assert found is not None, words
        command, words = found, words[1:]
    return command.make_context(command.name, list(words))


def test_readme_has_commands() -> None:
    assert {words[0] for words in commands()} == {
        "run",
        "compare",
        "plan",
        "doctor",
    }


def test_readme_quotes_the_checked_in_results() -> None:
    assert quoted(README) == README


def test_the_page_of_measured_numbers_quotes_the_checked_in_results() -> None:
    text = MEASURED.read_text("utf-8")
    assert quoted_measured(text) == text


def test_the_page_of_foreign_networks_quotes_the_checked_in_result() -> None:
    text = FOREIGN.read_text("utf-8")
    assert quoted_foreign(text) == text


@pytest.mark.parametrize("name", EXAMPLE_PAGES)
def test_the_page_of_an_example_quotes_the_checked_in_results(name: str) -> None:
    text = EXAMPLE_PAGES[name].read_text("utf-8")
    assert quoted_example(name, text) == text


@pytest.mark.parametrize("place", ["README.md", "Makefile"])
def test_trackers_of_readmes_commands_are_installed_by_its_first_ones(place: str) -> None:
    installed = re.search(r"pip install .*-e '?\.(?:\[([\w,]+)\])?", (ROOT / place).read_text("utf-8"))
    assert installed is not None
    assert set(re.findall(r"--tracker (\w+)", README)) <= set((installed[1] or "").split(","))


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_readme_commands_parse(words: list[str]) -> None:
    parse(words).close()


@pytest.mark.slow
def test_fields_of_a_result_are_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path))
    named = ["server.profile=i7-11850h", "devices.profile=raspberry-pi-5", "data.samples_per_device=100"]
    result = pipar.run({"run": {"epochs": 1}}, world="timing-only", settings=named)
    documented = (ROOT / "docs" / "reference" / "result.md").read_text("utf-8")
    assert [key for key in result.content if f"`{key}`" not in documented] == []


@pytest.mark.slow
def test_quickstart_runs(tmp_path: Path, profiles: Path) -> None:
    with place(tmp_path, profiles, {}) as here:
        program = here.run("quickstart", str(ROOT / "examples" / "quickstart.py"))
        assert program.ends() == 0, program.text()
        assert "prediction of the trained model" in program.text()
