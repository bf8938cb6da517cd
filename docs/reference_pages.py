"""Writes the two pages of the reference that repeat what the code says: the command line and Python.

    python -m docs.reference_pages

They are checked in, so that they can be read in a clone. A test compares them with what this writes.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

import pipar
from pipar.aggregation.aggregators import Aggregator, DeviceModel, DeviceModels
from pipar.cli import cli
from pipar.errors import InputError

FOLDER = Path(__file__).parent / "reference"
#: The width that click leaves for text in a terminal of 80 columns; fixed, so that the page is always the same.
WIDTH = 78
_MADE_BY = "<!-- Written by `python -m docs.reference_pages`: do not edit. -->"

_CLI = """\
# The command line

{made_by}

- Every command has `--help`.
- `--json` prints one JSON document on standard output and nothing else.
- `--set section.key=value` overrides a key of the [configuration](../configuration.md).
- Exit codes: 0 success, 2 bad input (one sentence on standard error), 1 failure, 130 after Ctrl-C with everything
  saved.

{commands}
"""

_PYTHON = """\
# Python

{made_by}

This page lists what `import pipar` provides, and what your own functions and classes must look like. In the examples,
`SMALL` is

```python
SMALL = ["run.epochs=2", "server.profile=i7-11850h", "devices.profile=raspberry-pi-5"]
```

and `model` and `datasets` are an `nn.Sequential` and a list of two datasets.

## Training

{run}

{STOP}

{compare}

{Result}

{Comparison}

## Planning

{plan}

{ChosenPlans}

## Configuration

{load_config}

{Config}

Its sections and keys are those of the [configuration](../configuration.md).

## Errors

{PiparError}

{InputError}

It is in `pipar.errors`.

## Your own functions

The configuration names them as "package.module:function". The current directory is searched first. If a function
raises, pipar reports the error in one sentence that names the function.

| key | called with | returns |
|---|---|---|
| `model.factory` | no arguments | an `nn.Module`; an `nn.Sequential` can be cut after each child |
| `data.factory` | a device's name, "validation" or "test" | a torch Dataset of (sample, label) pairs, or None |
| `server.aggregator` | the keys of `[server.aggregation]` as keyword arguments | an aggregator, below |

torch is seeded with `run.seed` before `model.factory` is called. `data.factory` returns None for a held-out set that
does not exist.

[examples/own_model.py](../../examples/own_model.py) shows the first two,
[examples/own_aggregator.py](../../examples/own_aggregator.py) the third.

## An aggregator

An aggregator that keeps nothing between rounds may omit `state` and `load_state`. The rules are in
[Aggregators](../aggregators.md#your-own); [Your own aggregator](../how-to/own-aggregator.md) has an example.

{Aggregator}

{DeviceModel}

{DeviceModels}

`State` above is a `Mapping[str, torch.Tensor]`.

## Watching a run

`pipar.run(observe=...)` takes a function. It is called with an event for everything that happens, such as a device that
joins or an epoch that ends. The [table of events](logs.md#events) lists their fields; the classes are in
`pipar.events`.
"""


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {"cli.md": cli_page(), "python.md": python_page()}


# --- commands


def cli_page() -> str:
    """Return the page of all commands: a table of them, then the help of each."""
    root = click.Context(cli, info_name="pipar", terminal_width=WIDTH, **cli.context_settings)
    contexts = list(_contexts(root))
    table = ["| command | what it does |", "|---|---|", *(_row(context) for context in contexts[1:])]
    parts = ["\n".join(table), *(_command(context) for context in contexts)]
    return _CLI.format(made_by=_MADE_BY, commands="\n\n".join(parts))


def _contexts(context: click.Context) -> Iterator[click.Context]:
    """Yield a command and all commands below it, in the order of the help."""
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            assert command is not None
            yield from _contexts(click.Context(command, info_name=name, parent=context, **command.context_settings))


def _row(context: click.Context) -> str:
    path = context.command_path
    return f"| [{path}](#{path.replace(' ', '-')}) | {context.command.get_short_help_str(200)} |"


def _command(context: click.Context) -> str:
    heading = "###" if context.command_path.count(" ") > 1 else "##"
    text = "\n".join(line.rstrip() for line in context.get_help().splitlines())
    return f"{heading} {context.command_path}\n\n```text\n{text}\n```"


# --- Python


def python_page() -> str:
    """Return the page of the public names, each with its signature and docstring."""
    public = {name: getattr(pipar, name) for name in pipar.__all__}
    extensible = {thing.__name__: thing for thing in (InputError, Aggregator, DeviceModel, DeviceModels)}
    entries = {name: _entry(name, thing) for name, thing in (public | extensible).items()}
    return _PYTHON.format(made_by=_MADE_BY, **entries)


def _entry(name: str, thing: Any) -> str:
    """Return the section of a function or a class; of a class with the members that it defines."""
    parts = [f"### {name}"]
    if inspect.isfunction(thing):
        parts.append(f"```text\n{signature(thing)}\n```")
    words, example = _without_example(thing.__doc__)
    parts += [words, f"```pycon\n{example}\n```"] if example else [words]
    if members := _members(thing):
        parts.append("\n".join(members))
    return "\n\n".join(parts)


def _without_example(docstring: str) -> tuple[str, str]:
    """Return what a docstring says, and the example at its end."""
    words, arrows, example = inspect.cleandoc(docstring).partition(">>> ")
    return words.strip(), f"{arrows}{example}"


def _members(thing: Any) -> list[str]:
    # A section of the configuration or an error is described elsewhere.
    if not inspect.isclass(thing) or issubclass(thing, pipar.Config | Exception):
        return []
    annotations = inspect.get_annotations(thing)
    fields = [f"- `{name}: {getattr(kind, '__forward_arg__', kind)}`" for name, kind in annotations.items()]
    return fields + [_member(name, value) for name, value in vars(thing).items() if _is_shown(name, value)]


def _is_shown(name: str, value: Any) -> bool:
    is_defined_here = isinstance(value, property) or inspect.isfunction(value)
    return is_defined_here and (not name.startswith("_") or name in ("__len__", "__iter__"))


def _member(name: str, value: Any) -> str:
    if isinstance(value, property):
        shown, doc = f"{name}: {inspect.get_annotations(value.fget)['return']}", value.fget.__doc__
    else:
        shown, doc = re.sub(r"\(self(, )?", "(", signature(value)), value.__doc__
    said = " ".join(_without_example(doc)[0].split()) if doc else ""
    return textwrap.fill(
        f"- `{shown}`{': ' if said else ''}{said}", 120, subsequent_indent="  ", break_on_hyphens=False
    )


def signature(function: Callable[..., Any]) -> str:
    """Return the signature as written in the code, without `def` and the colon."""
    source = textwrap.dedent(inspect.getsource(function))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    body = definition.body[0]
    # A body of "..." is on the line of the signature.
    lines = source.splitlines()[: body.lineno]
    head = "\n".join([*lines[:-1], lines[-1][: body.col_offset]])
    return head.strip().removesuffix(":").removeprefix("def ")


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, "utf-8")
