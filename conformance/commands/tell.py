"""``backends`` and ``capabilities``: what there is to judge, and by what."""

import argparse
import tempfile
from pathlib import Path

from mla_conformance.engine.folder import RunFolder
from mla_conformance.engine.request import Request, RequestError, known_names
from mla_conformance.engine.run import Limits, Run
from mla_conformance.files.inputs import InputError
from mla_conformance.judging.facts import BackendFacts
from mla_conformance.report.terminal import say
from mla_conformance.vocabulary.capabilities import CAPABILITIES
from mla_conformance.vocabulary.tiers import tier_lines


def tell_backends(options: argparse.Namespace) -> int:
    """A line for every backend: whether it can run here, or why not."""
    names = known_names()
    found = _described(names, options.device)
    width = max(len(facts.name) for facts in found)
    for facts in sorted(found, key=lambda facts: names.index(facts.name.partition("[")[0])):
        state = "unavailable: " + "; ".join(facts.reasons) if facts.reasons else "available"
        say(f"{facts.name:<{width}} {state}")
    return 0


def _described(names: list[str], device: str | None) -> list[BackendFacts]:
    with tempfile.TemporaryDirectory(prefix="mla-conformance-backends-") as folder:
        try:
            with Run(Request.of(names, device=device), RunFolder.claim(Path(folder)), Limits(workers=1)) as run:
                run.prepare()
                return run.facts
        except RequestError as error:
            raise InputError(str(error)) from error


def tell_capabilities(options: argparse.Namespace) -> int:
    """A line for every capability, and one for every tier."""
    for capability in CAPABILITIES.values():
        count = f"{len(capability.cases):>3} cases"
        say(f"{capability.name:<18} {count} · SPEC {capability.clause} · {capability.definition}")
    for line in tier_lines():
        say(line)
    return 0
