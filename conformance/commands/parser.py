"""A parser that says of a word which it does not know which one was meant."""

import argparse
from collections.abc import Sequence
from typing import Any

from mla_conformance.backends.references import unknown


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

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = "command" if isinstance(action, argparse._SubParsersAction) else action.dest
            raise argparse.ArgumentError(None, unknown(what, value, action.choices, f"{self.prog} --help"))
