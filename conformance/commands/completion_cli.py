"""The parser of ``completion``: what makes a shell know the commands, their options, and the names that exist here."""

import argparse
from typing import Any

SHELLS = ("bash", "zsh", "tcsh")


def add_commands(commands: Any, parser: argparse.ArgumentParser) -> None:
    """Add the parser of this command.

    Args:
        commands: receives it.
        parser: the whole command line, which is to be completed.
    """
    completion = commands.add_parser("completion", help="print a script that completes this command line in a shell")
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run=lambda options: _complete(options.shell, parser))


def _complete(shell: str, parser: argparse.ArgumentParser) -> int:
    from mla_conformance.commands.completion import tell_completion

    return tell_completion(shell, parser)
