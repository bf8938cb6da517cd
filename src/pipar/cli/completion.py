"""`pipar completion`: the script by which a shell completes what pipar knows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from pipar.cli.options import example

#: By which a shell asks the program for candidates; click looks it up for a program of this name.
VARIABLE = "_PIPAR_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
#: Signs that bash takes for words of their own.
_BREAKS = "=:"

_BASH = """\
%(complete_func)s() {
    local kind value
    COMPREPLY=()
    while IFS=',' read -r kind value; do
        case $kind in
            plain) COMPREPLY+=("$value") ;;
            file) compopt -o default ;;
            dir) compopt -o dirnames ;;
        esac
    done < <(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" %(complete_var)s=bash_complete "$1")
    # Behind a key its value follows, without a space.
    if [[ ${COMPREPLY[0]} == *= ]]; then compopt -o nospace; fi
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class BashCompletion(BashComplete):
    """Completion of bash, which takes run.method=fl or 127.0.0.1:80 for three words and asks for the last one."""

    source_template = _BASH

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._done = ""  # of the word, what bash does not want to hear again

    def get_completion_args(self) -> tuple[list[str], str]:
        words, current = split_arg_string(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
        # A word of which nothing is typed yet is not among them.
        joined, was_split = join_words(words[: current + 1] if current < len(words) else [*words, ""])
        *before, typed = joined
        value = typed.partition("=")[2] if typed.startswith("-") else typed
        self._done = value[: max(map(value.rfind, _BREAKS)) + 1] if was_split else ""
        return before[1:], typed

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[Any]]:
        found = super().get_completions(args, incomplete)
        return [CompletionItem(item.value.removeprefix(self._done), item.type, item.help) for item in found]


def join_words(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the words with what stands around an "=" or ":" as one, and whether the last one was in pieces."""
    joined: list[str] = []
    goes_on = False
    for word in words:
        is_break = bool(word) and set(word) <= set(_BREAKS)
        was_split = (goes_on or is_break) and bool(joined)
        if was_split:
            joined[-1] += word
        else:
            joined.append(word)
        goes_on = is_break
    return joined, was_split


add_completion_class(BashCompletion)


@click.command(
    short_help="Print the script for a shell.",
    epilog=example('eval "$(pipar completion bash)"', "pipar completion fish | source"),
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script by which bash, zsh or fish completes commands, options, names, keys and runs.

    \b
    For every new shell, add the line to its file:
      bash  ~/.bashrc                   eval "$(pipar completion bash)"
      zsh   ~/.zshrc                    eval "$(pipar completion zsh)"
      fish  ~/.config/fish/config.fish  pipar completion fish | source
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "pipar", VARIABLE).source())
