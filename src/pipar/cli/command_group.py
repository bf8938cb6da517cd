"""Groups of commands, and their help; commands of other modules are imported when they are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import click

#: The variable by which a shell asks for candidates; click derives it from the name of the program.
COMPLETION_VARIABLE = "_PIPAR_COMPLETE"


def example(*lines: str) -> str:
    """Return the examples that the help shows below the options."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


class Group(click.Group):
    """A group whose error for an unknown command lists the known ones."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(f"'{args[0]}' is not a command; there are {', '.join(self.list_commands(ctx))}.")
        return super().resolve_command(ctx, args)


@dataclass(frozen=True)
class Elsewhere:
    """A command of another module, with its line in the help of the group."""

    module: str
    summary: str


class LazyGroup(Group):
    """A group that imports the module of a command when the command is used, and none for its own help."""

    #: By name; the function in the module has the same name.
    elsewhere: Mapping[str, Elsewhere] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(self.elsewhere)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in self.elsewhere:
            return None
        command = getattr(import_module(self.elsewhere[cmd_name].module), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.elsewhere[name].summary) for name in self.list_commands(ctx)])


def help_if_alone(context: click.Context) -> None:
    """Show the help of a group if none of its commands was given."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


class Interrupted(Exception):  # noqa: N818 - it is no error
    """Ctrl-C, after the runs in these folders were saved."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [folder for folder in folders if (folder / "result.json").exists()]

    def __str__(self) -> str:
        if not self.folders:
            return "Stopped before there was anything to save."
        return f"Stopped. Saved in {', '.join(f'{folder}/' for folder in self.folders)}."
