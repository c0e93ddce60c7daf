"""From the table of commands to a parser, which says of a word that it does not know which one was meant."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pkgutil import resolve_name
from textwrap import fill
from typing import Any

from mla_conformance.backends.references import unknown
from mla_conformance.commands.options import Command
from mla_conformance.commands.table import COMMANDS, GROUPS
from mla_conformance.engine.request import NO_TORCH
from mla_conformance.files.inputs import InputError
from mla_conformance.report.terminal import put, typed, wrapped

_WIDTH = 80
_HOW_OFTEN = {"": "{}", "?": "[{}]", "+": "{} ..."}


class Parser(argparse.ArgumentParser):
    """A parser of commands; those of its commands are of this class, too."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The options; a word too many, where a backend could be named and is not, is told how to name one."""
        options, further = self.parse_known_args(args, namespace)
        if further:
            stray = next((word for word in further if not word.startswith("-")), "")
            is_backend = stray and not getattr(options, "backend", stray)
            hint = f"; a backend is named with an option: --backend {stray}" if is_backend else ""
            self.error(f"unrecognized arguments: {' '.join(further)}{hint}")
        return options

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if not arg_string.strip():
            raise argparse.ArgumentError(action, "expected a value, got an empty one")
        return super()._get_value(action, arg_string)

    def _print_message(self, message: str, file: Any = None) -> None:
        put(message.removesuffix("\n"), error=file is not sys.stdout)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = "command" if isinstance(action, argparse._SubParsersAction) else action.dest
            raise argparse.ArgumentError(None, unknown(what, value, action.choices, f"{self.prog} --help"))


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(text, width)


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every command of the table; ``run`` of what is parsed carries it out and gives the exit status."""
    rooms = {"": parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")}
    for command in COMMANDS:
        room, _, word = command.words.rpartition(" ")
        if room not in rooms:
            rooms[room] = rooms[""].add_parser(room, help=GROUPS[room]).add_subparsers(required=True)
        _fill(rooms[room].add_parser(word, help=command.help), command, parser.prog)


def _fill(parser: argparse.ArgumentParser, command: Command, program: str) -> None:
    for alternatives in command.alternatives:
        which = parser.add_mutually_exclusive_group() if len(alternatives) > 1 else parser
        for option in alternatives:
            which.add_argument(*option.names, **option.settings)
    parser.usage = " ".join(["%(prog)s [options]", *_given(command)])
    calls = [line for call in command.examples for line in typed(f"{program} {command.words} {call}", _WIDTH, "  ")]
    status = fill(f"exit status: {command.statuses}", _WIDTH, subsequent_indent="  ")
    parser.epilog = "\n".join(["examples:", *calls, "", status])
    parser.formatter_class = _Formatter
    parser.set_defaults(run=partial(_carry_out, command.run))


def _given(command: Command) -> Iterator[str]:
    """The options that have to be given and the arguments, as a usage line has them."""
    for option in sorted(chain(*command.alternatives), key=lambda option: not option.names[0].startswith("-")):
        metavar, how_often = option.settings.get("metavar"), option.settings.get("nargs", "")
        if not option.names[0].startswith("-"):
            yield _HOW_OFTEN[how_often].format(metavar)
        elif option.settings.get("required"):
            yield f"{option.names[-1]} {metavar}"


def _carry_out(function: str, options: argparse.Namespace) -> int:
    """Import what carries a command out, and have it do so.

    Raises:
        InputError: it takes torch, which is not here.
    """
    try:
        status: int = resolve_name(function)(options)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError(NO_TORCH) from error
    return status
