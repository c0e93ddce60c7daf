"""From the table of commands to a parser, which says of a word that it does not know which one was meant."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pkgutil import resolve_name
from textwrap import fill
from typing import Any, NoReturn

from mla_conformance.backends.references import unknown
from mla_conformance.commands.options import Command, salt
from mla_conformance.commands.table import COMMANDS, GROUPS
from mla_conformance.engine.request import NO_TORCH
from mla_conformance.files.inputs import InputError
from mla_conformance.report.terminal import put, refuse, typed, wrapped

_WIDTH = 79
_HOW_OFTEN = {"": "{}", "?": "[{}]", "+": "{} ...", "*": "[{} ...]"}


class Parser(argparse.ArgumentParser):
    """A parser of commands; those of its commands are of this class, too."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The options; a word too many, where a backend could be named and is not, is told how to name one."""
        options, further = self.parse_known_args(args, namespace)
        if further:
            own = options.run.args[-1] if isinstance(options.run, partial) else self
            stray = next((word for word in further if not word.startswith("-")), "")
            if further[0].startswith("--"):
                own.error(unknown("option", further[0], own._option_string_actions, f"{own.prog} --help"))
            is_backend = stray and not getattr(options, "backend", stray)
            hint = f"; a backend is named with an option: --backend {stray}" if is_backend else ""
            own.error(f"unrecognized arguments: {' '.join(further)}{hint}")
        return options

    def error(self, message: str) -> NoReturn:
        """What is given may be anything, and is shown as what comes from elsewhere always is."""
        self.print_usage(sys.stderr)
        refuse(self.prog, f"error: {message}")
        sys.exit(2)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Words behind a command are its own parser's; an empty salt is that of the list's inputs."""
        may_be_empty = isinstance(action, argparse._SubParsersAction) or action.type is salt
        if not (may_be_empty or arg_string.strip()):
            raise argparse.ArgumentError(action, "expected a value, got an empty one")
        try:
            return action.type(arg_string) if callable(action.type) else arg_string
        except InputError as error:
            raise argparse.ArgumentError(action, str(error)) from error

    def _print_message(self, message: str, file: Any = None) -> None:
        put(message.removesuffix("\n"), error=file is not sys.stdout)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            is_command = isinstance(action, argparse._SubParsersAction)
            said = unknown("command" if is_command else "value", value, action.choices, f"{self.prog} --help")
            raise argparse.ArgumentError(None if is_command else action, said)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(text, width)


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every command of the table; ``run`` of what is parsed carries it out and gives the exit status."""
    rooms = {"": parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")}
    for command in COMMANDS:
        room, _, word = command.words.rpartition(" ")
        if room not in rooms:
            outer = rooms[""].add_parser(room, help=GROUPS[room], description=_sentence(GROUPS[room]))
            rooms[room] = outer.add_subparsers(required=True)
        own = rooms[room].add_parser(word, help=command.help, description=_sentence(command.help))
        groups: dict[str, argparse._ActionsContainer] = {"": own}
        required, given = [], []  # a usage line has the options that have to be given, and the arguments
        for alternatives in command.options:
            heading = alternatives[0].group
            if heading not in groups:
                groups[heading] = own.add_argument_group(heading)
            which = groups[heading].add_mutually_exclusive_group() if len(alternatives) > 1 else groups[heading]
            for option in alternatives:
                which.add_argument(*option.names, **option.settings)
                metavar = option.settings.get("metavar")
                if not option.names[0].startswith("-"):
                    given.append(_HOW_OFTEN[option.settings.get("nargs", "")].format(metavar))
                elif option.settings.get("required"):
                    required.append(f"{option.names[-1]} {metavar}")
        own.usage = " ".join(["%(prog)s [options]", *required, *given])
        called = f"{parser.prog} {command.words}"
        calls = [line for call in command.examples for line in typed(f"{called} {call}", _WIDTH, "  ")]
        status = fill(f"exit status: {command.statuses}", _WIDTH, subsequent_indent="  ")
        own.epilog = "\n".join(["examples:", *calls, "", status])
        own.formatter_class = _Formatter
        if room:
            outer = rooms[""].choices[room]
            outer.epilog = "\n\n".join(filter(None, (outer.epilog, f"{word}, {own.epilog}")))
            outer.formatter_class = _Formatter
        own.set_defaults(run=partial(_carry_out, command, own))


def _sentence(text: str) -> str:
    return fill(f"{text[0].upper()}{text[1:]}.", _WIDTH)


def _carry_out(command: Command, parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Import what carries a command out, and have it do so."""

    def is_given(name: str) -> bool:
        dest = name.lstrip("-").replace("-", "_")
        return bool(getattr(options, dest) != parser.get_default(dest))

    for option in chain(*command.options):
        if option.only_with and is_given(option.names[-1]) and not any(map(is_given, option.only_with)):
            raise InputError(f"{option.names[-1]}: expected together with {' or '.join(option.only_with)}")
    try:
        if file := getattr(options, "role", None):
            from mla_conformance.trials.role_file import take_up  # with torch

            take_up(file)
        status: int = resolve_name(command.run)(options)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError(NO_TORCH) from error
    return status
