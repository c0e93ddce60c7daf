"""What a command is, for the table of all of them: its words, its options, what carries it out, how its help ends."""

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from mla_conformance.engine.limits import machine_cores
from mla_conformance.engine.request import require_salt
from mla_conformance.files.inputs import InputError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST = 366 * 24 * 3600.0
_WORKERS_PER_CORE = 4  # more would only wait for each other, until a machine has no memory left for them


@dataclass(frozen=True)
class Option:
    """An option or an argument, as ``ArgumentParser.add_argument`` takes it."""

    names: tuple[str, ...]  # a short one stands before the long one
    settings: dict[str, Any]  # what else ``add_argument`` is told
    only_with: tuple[str, ...] = ()  # options without any of which it means nothing
    group: str = ""  # the heading that it stands under in the help; empty for the usual one


@dataclass(frozen=True)
class Command:
    words: str  # behind the program's name
    help: str  # one line
    run: str  # ``module:function``, imported when the command is carried out; takes the options, gives the exit status
    options: tuple[tuple[Option, ...], ...]  # in the order of the help; of each tuple at most one may be given
    examples: tuple[str, ...]  # arguments of calls that make sense
    statuses: str  # what each exit status says


def command(
    words: str,
    help_text: str,
    run: str,
    *options: Option | tuple[Option, ...] | str,
    examples: tuple[str, ...] = ("",),
    statuses: str = "0 listed; 2 usage",
) -> Command:
    """A command; of options in a tuple of their own at most one may be given, and a text is a heading of the next."""
    alternatives, heading = list[tuple[Option, ...]](), ""
    for each in options:
        if isinstance(each, str):
            heading = each
        else:
            among = each if isinstance(each, tuple) else (each,)
            alternatives.append(tuple(replace(option, group=heading) for option in among))
    return Command(words, help_text, run, tuple(alternatives), examples, statuses)


def option(names: str, metavar: str, help_text: str, only_with: str = "", **settings: Any) -> Option:
    return Option(tuple(names.split()), {"metavar": metavar, "help": help_text, **settings}, tuple(only_with.split()))


def flag(names: str, help_text: str, only_with: str = "", **settings: Any) -> Option:
    told = {"action": "store_true", "help": help_text, **settings}
    return Option(tuple(names.split()), told, tuple(only_with.split()))


def path(name: str, metavar: str, help_text: str, **settings: Any) -> Option:
    return option(name, metavar, help_text, type=Path, **settings)


def several(name: str, metavar: str, help_text: str, **settings: Any) -> Option:
    return option(name, metavar, help_text, action="append", default=[], **settings)


def seconds(text: str) -> float:
    """A positive time in seconds, or with a unit: ``90``, ``90s``, ``40m``, ``2h``."""
    found = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([smh]?)", text)
    value = float(found[1]) * _UNITS[found[2] or "s"] if found else 0.0
    if not 0 < value <= _LONGEST:
        raise InputError(f"expected a positive time such as 90, 90s, 40m or 2h, of a year at most, got {text!r}")
    return value


def number(least: int, most: int = 10**9) -> Callable[[str], int]:
    """What reads a number in these limits, written in ASCII digits; anything else is an InputError."""

    def read(text: str) -> int:
        if not (re.fullmatch("[0-9]{1,10}", text) and least <= int(text) <= most):
            raise InputError(f"expected a number of at least {least} and at most {most:,}, got {text!r}")
        return int(text)

    return read


def salt(text: str) -> str:
    require_salt(text)
    return text


count = number(1)
workers = number(1, _WORKERS_PER_CORE * machine_cores())


def drift(text: str) -> float:
    share = float(text) if re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e-[0-9]+)?", text) else -1.0
    if not 0 <= share <= 1:
        raise InputError(f"expected a share of the error budget from 0 to 1, got {text!r}")
    return share


def commands_of(parser: argparse.ArgumentParser, words: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parsers that carry something out, with the words that lead to each."""
    rooms = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not rooms:
        yield words, parser
    for room in rooms:
        for word, inner in room.choices.items():
            yield from commands_of(inner, f"{words} {word}".lstrip())


def require_tests(what: str) -> None:
    """Refuse what stands among the tests where these are not."""
    if not (files("mla_conformance") / "tests").is_dir():
        raise InputError(
            f"{what}: needs a checkout, since no wheel holds the tests; clone the project and: pip install -e ."
        )
