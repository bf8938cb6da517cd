"""`pipar completion`: shell completion of commands, options, names, keys and runs."""

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

from pipar.cli.command_group import COMPLETION_VARIABLE, example

SHELLS = ("bash", "zsh", "fish")
#: Characters at which bash splits words.
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
    # After a key comes its value, without a space.
    if [[ ${COMPREPLY[0]} == *= ]]; then compopt -o nospace; fi
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class BashCompletion(BashComplete):
    """Completion for bash, which splits run.method=fl or 127.0.0.1:80 into three words and completes the last."""

    source_template = _BASH

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._done = ""  # the part of the word that bash does not expect in a candidate

    def get_completion_args(self) -> tuple[list[str], str]:
        words, current = split_arg_string(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
        # A word that is still empty is not among them.
        joined, was_split = join_words(words[: current + 1] if current < len(words) else [*words, ""])
        *before, typed = joined
        value = typed.partition("=")[2] if typed.startswith("-") else typed
        self._done = value[: max(map(value.rfind, _BREAKS)) + 1] if was_split else ""
        return before[1:], typed

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[Any]]:
        found = super().get_completions(args, incomplete)
        return [CompletionItem(item.value.removeprefix(self._done), item.type, item.help) for item in found]


def join_words(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the words, joined again around "=" and ":", and whether the last one was split."""
    joined: list[str] = []
    continues = False
    for word in words:
        is_break = bool(word) and set(word) <= set(_BREAKS)
        was_split = (continues or is_break) and bool(joined)
        if was_split:
            joined[-1] += word
        else:
            joined.append(word)
        continues = is_break
    return joined, was_split


add_completion_class(BashCompletion)


@click.command(
    short_help="Print the completion script of a shell.",
    epilog=example('eval "$(pipar completion bash)"', "pipar completion fish | source"),
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options, names, keys and runs in bash, zsh or fish.

    \b
    To load it in every new shell, add this line to its file:
      bash  ~/.bashrc                   eval "$(pipar completion bash)"
      zsh   ~/.zshrc                    eval "$(pipar completion zsh)"
      fish  ~/.config/fish/config.fish  pipar completion fish | source
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "pipar", COMPLETION_VARIABLE).source())
