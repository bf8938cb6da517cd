"""Commands and the terminal.

Shared by the commands: `options`, `completion_candidates`. One module per command, or per pair of commands:
`train` (run, compare), `deploy` (server, device), `plan`, `cuts`, `profile`, `leakage`, `report`, `replay`, `certs`,
`data`, `doctor` with its `doctor_checks` and `machine_limits`, `completion`. Output: `tables`, `plan_view`, `cut_view`,
`timeline_text`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

import click

from pipar.cli import certs, completion, cuts, data, deploy, doctor, leakage, plan, profile, replay, report, train
from pipar.cli.options import Group, Interrupted, as_setting, example, help_if_alone, of_other_commands
from pipar.errors import InputError, PiparError


@click.group(
    cls=Group,
    no_args_is_help=False,
    invoke_without_command=True,
    epilog=example("pipar run --virtual --epochs 2", "pipar compare --methods fl,pipar --timing-only"),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(metadata.version("pipar"), message="pipar %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Pipelined split federated learning across devices, real or in virtual time."""
    help_if_alone(context)


_COMMANDS = (
    train.run, train.compare, deploy.server, deploy.device, certs.certs, plan.plan, cuts.cuts, profile.profile,
    leakage.leakage, report.report, replay.replay, data.data, doctor.doctor, completion.completion,
)  # fmt: skip
for command in _COMMANDS:
    cli.add_command(command)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code."""
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
        owners = [str(one.name) for one in _COMMANDS if any(error.option_name in option.opts for option in one.params)]
        setting = as_setting(error)
        text = of_other_commands(error, owners) if owners and not setting else text + setting
    # Sentences of libraries may start in lower case; names of keys and datasets keep their case.
    first = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if first in ("the", "there", "a", "an", "item") else text
