"""Every block of code in the documents is run, or says why it is not; every command that is named exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest
from support.document_blocks import ROOT, Block, Reader, blocks_of, documents, make_targets, reader, recipe
from support.programs import Place

from pipar.cli import cli
from pipar.settings.config_file import config_from

RUN = ("sh", "python", "toml")
#: Examples of docstrings (pycon) are run by `test_docstrings.py`.
SHOWN = ("text", "json", "ini", "pycon")
#: Why a block is not run. "Covered by" names a test that does the same.
REASONS = ("needs root", "needs two machines", "needs zsh or fish", "installs packages", "downloads")
COVERED = re.compile(r"takes long: covered by (tests/\S+\.py)")

BLOCKS = {document: blocks_of(document) for document in documents()}
ALL_BLOCKS = [block for blocks in BLOCKS.values() for block in blocks]


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def runnable(blocks: list[Block]) -> list[Block]:
    """Return the blocks that a reader runs or compares; configurations without a name have their own test."""
    return [block for block in blocks if block.reason is None and (block.language in ("sh", "python") or block.title)]


def has_reader(document: Path) -> bool:
    return bool(runnable(BLOCKS[document]))


# --- every block is classified


def test_every_block_has_a_language_that_is_run_or_only_shown() -> None:
    assert [str(block) for block in ALL_BLOCKS if block.language not in (*RUN, *SHOWN)] == []


@pytest.mark.parametrize("block", [block for block in ALL_BLOCKS if block.comment], ids=str)
def test_a_comment_before_a_block_is_a_known_one(block: Block) -> None:
    if block.quickened:
        assert block.language == "sh"
        lines = [shlex.split(f"{line} {block.quickened}", comments=True) for line in block.commands]
        assert [wrong for words in lines if words[0].endswith("pipar") for wrong in mistakes(words[1:])] == []
    elif block.reason is None:
        assert block.is_printed
        assert block.language == "text"
    elif covered := COVERED.fullmatch(block.reason):
        assert (ROOT / covered[1]).exists()
    else:
        assert block.reason in REASONS


@pytest.mark.parametrize("block", [block for block in ALL_BLOCKS if block.title], ids=str)
def test_a_file_that_a_reader_creates_is_used_by_a_later_command(block: Block) -> None:
    later = [other.text for other in BLOCKS[block.document] if other.line > block.line]
    assert block.title is not None
    stem = block.title.removesuffix(".py")
    assert any(re.search(rf"\b{re.escape(stem)}\b", text) for text in later)


@pytest.mark.parametrize("block", [block for block in ALL_BLOCKS if block.language == "toml"], ids=str)
def test_a_toml_block_is_a_valid_configuration(block: Block) -> None:
    config_from(tomllib.loads(block.text))


# --- blocks

MADE_UP = """
Words, and `code`.

    pipar run --epochs 1
    make demo

    no command

<!-- not run: needs root -->
```sh
rm -rf /
```

```toml title="mine.toml"
[run]
```

<!-- tested with: --epochs 1 -->
```sh
pipar run \\
  --virtual
```

<!-- as printed -->
```text
as   it was
```
"""


def made_up(folder: Path, text: str = MADE_UP) -> list[Block]:
    path = folder / "made-up.md"
    path.write_text(text, "utf-8")
    return blocks_of(path)


def test_blocks_are_found_with_their_comments(tmp_path: Path) -> None:
    indented, root, named, quickened, printed = made_up(tmp_path)
    assert indented.commands == ["pipar run --epochs 1", "make demo"]
    assert (root.reason, root.language, root.line) == ("needs root", "sh", 10)
    assert (named.title, named.reason, named.text) == ("mine.toml", None, "[run]\n")
    assert [line.split() for line in quickened.commands] == [["pipar", "run", "--virtual"]]
    assert quickened.quickened == "--epochs 1"
    assert printed.is_printed


def test_a_reader_notices_a_line_that_is_no_longer_printed(tmp_path: Path) -> None:
    printed = made_up(tmp_path)[-1]
    someone = Reader(Place(tmp_path, tmp_path, {}), printed="before\nas it  was\n")
    someone.do(printed)
    someone.printed = "as it is"
    with pytest.raises(AssertionError, match="has other lines"):
        someone.do(printed)


def test_a_reader_notices_a_command_that_fails(tmp_path: Path) -> None:
    (block,) = made_up(tmp_path, "```sh\nls nothing | cat; false\n```\n")
    with pytest.raises(AssertionError, match="nothing"):
        Reader(Place(tmp_path, tmp_path, {})).do(block)


# --- commands by name


def shown_commands(document: Path) -> list[str]:
    """Return everything that looks like a command of pipar: in running text, and as a line of a block."""
    text = document.read_text("utf-8")
    inline = re.findall(r"(?<!`)`(pipar [^`]+)`(?!`)", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S))
    lines = [line for block in BLOCKS[document] if block.language in ("sh", "text") for line in block.commands_shown]
    return [" ".join(command.split()) for command in (*inline, *lines)]


def known_options(command: click.Command) -> set[str]:
    names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return {*names, "--help", "-h"}


def mistakes(words: list[str]) -> list[str]:
    """Return the words that are neither commands nor options; arguments are not checked."""
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        choices = words[0].split("|")
        found = [command.get_command(context, choice) for choice in choices]
        if None in found:
            return [words[0]] if words[0].islower() else []
        assert found[0] is not None
        command, words = found[0], words[1:]
    options = [word.partition("=")[0] for word in words if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", word)]
    return [option for option in options if option not in known_options(command)]


def test_named_commands_and_options_exist() -> None:
    assert [
        (name_of(document), command, wrong)
        for document in documents()
        for command in shown_commands(document)
        if (wrong := mistakes(shlex.split(command, comments=True)[1:]))
    ] == []


@pytest.mark.parametrize("command", ["pipar rnu", "pipar run --epoch 3", "pipar certs isue pi-1", "pipar -x"])
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert mistakes(command.split()[1:]) != []


def test_blocks_name_existing_make_targets_whose_commands_exist() -> None:
    lines = [line for block in ALL_BLOCKS if block.language == "sh" for line in block.commands]
    named = {line.split()[1] for line in lines if line.startswith("make ")}
    assert named
    assert named <= make_targets()
    commands = [command for target in named for command in recipe(target)]
    words = [shlex.split(command.removeprefix(".venv/bin/")) for command in commands]
    assert [command for command in words if command[0] != "pipar" or mistakes(command[1:])] == []


# --- a reader


@pytest.mark.slow
@pytest.mark.parametrize("document", list(filter(has_reader, documents())), ids=name_of)
def test_a_reader_can_follow_the_page(document: Path, tmp_path: Path, profiles: Path) -> None:
    with reader(tmp_path, profiles, {}) as someone:
        for block in BLOCKS[document]:
            if block.reason is None:
                someone.do(block)
