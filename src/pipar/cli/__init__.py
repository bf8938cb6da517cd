"""Commands and the terminal.

Shared by the commands: `command_group`, `options`, `completion_candidates`. One module per command, or per pair of
commands: `train` (run, compare), `deploy` (server, device), `plan`, `cuts`, `profile`, `leakage`, `report`, `replay`,
`certs`, `data`, `doctor` with its `doctor_checks` and `machine_limits`, `completion`. Output: `tables`, `plan_view`,
`cut_view`, `timeline_text`.
"""

from __future__ import annotations

import atexit
import gc
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from pipar.cli.command_group import (
    COMPLETION_VARIABLE,
    Elsewhere,
    Interrupted,
    LazyGroup,
    example,
    help_if_alone,
)
from pipar.errors import InputError, PiparError


class Commands(LazyGroup):
    """The commands of pipar."""

    elsewhere = {  # noqa: RUF012 - of all instances
        "certs": Elsewhere("pipar.cli.certs", "Create certificates and tokens for a deployment."),
        "compare": Elsewhere("pipar.cli.train", "Train with several methods, and compare them in one table."),
        "completion": Elsewhere("pipar.cli.completion", "Print the completion script of a shell."),
        "cuts": Elsewhere("pipar.cli.cuts", "Show where a network can be cut, and what crosses there."),
        "data": Elsewhere("pipar.cli.data", "List known datasets, or download one."),
        "device": Elsewhere("pipar.cli.deploy", "Run a device of a deployment."),
        "doctor": Elsewhere("pipar.cli.doctor", "Check whether pipar works on this machine."),
        "leakage": Elsewhere("pipar.cli.leakage", "Attack the activations at each cut, and report what leaks."),
        "plan": Elsewhere("pipar.cli.plan", "Choose P and N for every device, and show why."),
        "profile": Elsewhere("pipar.cli.profile", "Measure the layers on this machine."),
        "replay": Elsewhere("pipar.cli.replay", "Replay a recorded run: what happened, and what if."),
        "report": Elsewhere("pipar.cli.report", "Write the HTML report of a run, or compare several."),
        "run": Elsewhere("pipar.cli.train", "Train with one method."),
        "server": Elsewhere("pipar.cli.deploy", "Run the server of a deployment."),
    }


@click.group(
    cls=Commands,
    no_args_is_help=False,
    invoke_without_command=True,
    epilog=example("pipar run --virtual --epochs 2", "pipar compare --methods fl,pipar --timing-only"),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="pipar", message="pipar %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Pipelined split federated learning across devices, real or in virtual time."""
    help_if_alone(context)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code."""
    # The interpreter's last collection would look at all of torch, which takes half a second and frees nothing.
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    if COMPLETION_VARIABLE in os.environ:
        from pipar.cli import completion  # noqa: F401 - it knows how bash completes
    sys.exit(exit_code(cli, "pipar", sys.argv[1:] if args is None else args))


def exit_code(command: click.Command, name: str, args: Sequence[str]) -> int:
    """Run a command and return its exit code; an error is one line on standard error."""
    try:
        code = command.main(list(args), name, standalone_mode=False, obj=shlex.join([name, *args]))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except click.Abort:
        return _say("Stopped.", 130)
    except Interrupted as stopped:
        return _say(str(stopped), 130)
    except (click.UsageError, InputError) as error:
        return _say(_message(error), 2)
    except PiparError as error:
        return _say(_message(error), 1)
    except Exception as error:  # the program ends here, with one line
        if os.environ.get("PIPAR_TRACEBACK"):
            raise
        return _say(f"{type(error).__name__}: {error} (PIPAR_TRACEBACK=1 shows where.)", 1)
    return code if isinstance(code, int) else 0


def _say(message: str, code: int) -> int:
    click.echo(" ".join(message.split()), err=True)
    return code


def _message(error: Exception) -> str:
    text = error.format_message() if isinstance(error, click.ClickException) else str(error)
    if isinstance(error, click.NoSuchOption):
        from pipar.cli.options import as_setting, of_other_commands

        owners = [name for name in Commands.elsewhere if error.option_name in _option_names(name)]
        setting = as_setting(error)
        text = of_other_commands(error, owners) if owners and not setting else text + setting
    # Sentences of libraries may start in lower case; names of keys and datasets keep their case.
    first = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if first in ("the", "there", "a", "an", "item") else text


def _option_names(name: str) -> set[str]:
    """Return the options of a command of pipar."""
    command = cli.get_command(click.Context(cli), name)
    return {option for one in command.params for option in one.opts} if command else set()
