"""``completion``: the script for a shell, with the backends, capabilities and tiers that are known here."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import shtab

from mla_conformance.backends.references import known_backends
from mla_conformance.commands.examples import commands_of
from mla_conformance.engine.request import DEVICES
from mla_conformance.report.terminal import put
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier


def tell_completion(shell: str, parser: argparse.ArgumentParser) -> int:
    """Print the script; the exit status."""
    known = _known()
    for _, command in commands_of(parser):
        for action in command._actions:
            if action.type is Path:  # shtab reads these attributes; the parser parses nothing any more
                action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
            else:
                action.choices = known.get(action.dest, action.choices)
    put(shtab.complete(parser, shell))
    return 0


def _known() -> dict[str, Sequence[str]]:
    """What can stand behind an option, by the option's name."""
    backends = [backend.name for backend in known_backends()]
    return {
        "backend": backends,
        "require": backends,
        "runs": backends,
        "capability": list(CAPABILITIES),
        "tier": list(Tier),
        "device": DEVICES,
    }
