"""The command line: what a command and its options are, for the table of all of them, and the parser made of it."""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from textwrap import fill
from typing import Any, NoReturn

from mla_conformance.backends.references import unknown
from mla_conformance.cases.sharding import Extent
from mla_conformance.engine.request import NO_TORCH, require_salt
from mla_conformance.files.whole import InputError
from mla_conformance.report.terminal import put, refuse, typed, wrapped
from mla_conformance.version import SUITE_VERSION, __version__

NAME, USAGE = "mla-conformance", 2
_FIRST = """to begin with:
  mla-conformance certify --backend TORCH_SDPA                 judge a kernel
  mla-conformance certify --backend my_backend.py:MyBackend    judge your own
  mla-conformance backends                                     which can run here
  mla-conformance --help                                       all commands"""
_WIDTH = 79
_HOW_OFTEN = {"": "{}", "?": "[{}]", "+": "{} ...", "*": "[{} ...]"}


def seconds(text: str) -> float:
    found = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([smh]?)", text)
    value = float(found[1]) * {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}[found[2]] if found else 0.0
    if not 0 < value <= 366 * 24 * 3600.0:
        raise InputError(f"expected a positive time such as 90, 90s, 40m or 2h, of a year at most, got {text!r}")
    return value


def number(text: str, least: int = 1, most: int = 10**9) -> int:
    if not (re.fullmatch("[0-9]{1,10}", text) and least <= int(text) <= most):
        raise InputError(f"expected a number of at least {least} and at most {most:,}, got {text!r}")
    return int(text)


def drift(text: str) -> float:
    share = float(text) if re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e-[0-9]+)?", text) else -1.0
    if not 0 <= share <= 1:
        raise InputError(f"expected a share of the error budget from 0 to 1, got {text!r}")
    return share


_PATHS = "AFTER BEFORE DIR FILE FILE|DIR KEY PATH RECORD REPORT SHARD"
_TYPES: dict[str, Callable[[str], Any]] = dict.fromkeys(_PATHS.split(), Path)
_TYPES |= {"K": number, "N": number, "N|TIME": Extent.of, "SHARE": drift, "TEXT": require_salt, "TIME": seconds}
"""What a value is, by what it is called in a usage; else a text."""


class Option:
    def __init__(self, usage: str, help_text: str, only_with: str = "", **settings: Any) -> None:
        *names, last = usage.split()
        is_flag = last.startswith("-")
        self.names = (*names, last) if is_flag else tuple(names)
        kind: dict[str, Any] = {"action": "store_true"} if is_flag else {"metavar": last}
        if last in _TYPES:
            kind["type"] = _TYPES[last]
        elif last.islower() and "|" in last:
            kind["choices"] = last.split("|")
        self.settings = {**kind, "help": help_text, **settings}
        self.only_with = tuple(only_with.split())  # options without any of which it means nothing


several = partial(Option, action="append", default=[])


class Command:
    def __init__(
        self,
        entry: str,  # ``words = module:function``, which is imported when it is carried out; it gives the exit status
        help_text: str,
        *options: Option | tuple[Option, ...] | str,  # of those in a tuple at most one may be given; or a heading
        examples: tuple[str, ...] = ("",),  # arguments of calls that make sense
        statuses: str = "0 done; 2 usage",  # what each exit status says
    ) -> None:
        self.words, _, self.run = entry.partition(" = ")
        self.help, self.examples, self.statuses, heading = help_text, examples, statuses, ""
        self.options = list[Option]()
        self.under = list[tuple[str, tuple[Option, ...]]]()  # alternatives, with what they stand under in the help
        for each in options:
            if isinstance(each, str):
                heading = each
            else:
                self.under.append((heading, each if isinstance(each, tuple) else (each,)))
                self.options += self.under[-1][1]


def commands_of(parser: argparse.ArgumentParser, words: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    rooms = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not rooms:
        yield words, parser
    for room in rooms:
        for word, inner in room.choices.items():
            yield from commands_of(inner, f"{words} {word}".lstrip())


class Parser(argparse.ArgumentParser):
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
        may_be_empty = isinstance(action, argparse._SubParsersAction) or action.type is require_salt
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


def command_line(commands: Sequence[Command], groups: Mapping[str, str]) -> Parser:
    parser = Parser(NAME, description="Decides whether an MLA kernel is right.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}, suite {SUITE_VERSION}")
    parser.set_defaults(run=_say_how_to_begin, parser=parser)
    rooms = {"": parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")}
    for command in commands:
        room, _, word = command.words.rpartition(" ")
        if room not in rooms:
            description = fill(f"{groups[room].capitalize()}.", _WIDTH)
            outer = rooms[""].add_parser(room, help=groups[room], description=description)
            rooms[room] = outer.add_subparsers(required=True)
        description = fill(f"{command.help[0].upper()}{command.help[1:]}.", _WIDTH)
        own = rooms[room].add_parser(word, help=command.help, description=description)
        within: dict[str, argparse._ActionsContainer] = {"": own}
        required, given = [], []  # a usage line has the options that have to be given, and the arguments
        for heading, alternatives in command.under:
            if heading not in within:
                within[heading] = own.add_argument_group(heading)
            which = within[heading].add_mutually_exclusive_group() if len(alternatives) > 1 else within[heading]
            for option in alternatives:
                which.add_argument(*option.names, **option.settings)
                metavar = option.settings.get("metavar")
                if not option.names[0].startswith("-"):
                    given.append(_HOW_OFTEN[option.settings.get("nargs", "")].format(metavar))
                elif option.settings.get("required"):
                    required.append(f"{option.names[-1]} {metavar}")
        own.usage = " ".join(["%(prog)s [options]", *required, *given])
        called = f"{NAME} {command.words}"
        calls = [line for call in command.examples for line in typed(f"{called} {call}", _WIDTH, "  ")]
        status = fill(f"exit status: {command.statuses}", _WIDTH, subsequent_indent="  ")
        own.epilog = "\n".join(["examples:", *calls, "", status])
        own.formatter_class = _Formatter
        if room:
            outer = rooms[""].choices[room]
            outer.epilog = "\n\n".join(filter(None, (outer.epilog, f"{word}, {own.epilog}")))
            outer.formatter_class = _Formatter
        own.set_defaults(run=partial(_carry_out, command, own))
    return parser


def _say_how_to_begin(options: argparse.Namespace) -> int:
    put(f"{options.parser.format_usage()}\n{options.parser.description}\n\n{_FIRST}", error=True)
    return USAGE


def _carry_out(command: Command, parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    usual = ((name, parser.get_default(name)) for name in vars(options))
    given = {f"--{name.replace('_', '-')}" for name, default in usual if getattr(options, name) != default}
    for option in command.options:
        if option.names[-1] in given and option.only_with and given.isdisjoint(option.only_with):
            raise InputError(f"{option.names[-1]}: expected together with {' or '.join(option.only_with)}")
    try:
        if file := getattr(options, "role", None):
            from mla_conformance.trials.role_file import take_up  # with torch

            take_up(file)
        return int(resolve_name(command.run)(options))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError(NO_TORCH) from error
