"""``capabilities --backend``: the part of each role's space that a backend declares, and the cases fitted to it."""

import sys
from collections.abc import Iterator
from pathlib import Path

from mla_conformance.cases.covering import Pairs
from mla_conformance.cases.fitting import MOST_TRIPLES
from mla_conformance.cases.space import Space
from mla_conformance.engine.machine import find_device
from mla_conformance.engine.request import RunRequest
from mla_conformance.files.whole import InputError
from mla_conformance.report.terminal import say
from mla_conformance.trials.explore import region_of
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.arrays import SPACES
from mla_conformance.vocabulary.tiers import wrapped


def list_unreached(reference: str, device: str | None) -> int:
    request = RunRequest.of([reference], device=device)
    found = find_device(request.device)
    if found is None:
        raise InputError("--device cuda: torch sees no CUDA device; use --device cpu")
    sys.path.append(str(Path.cwd()))  # where a plug-in's module often is
    for backend in request.backends:
        subject = Subject(backend, found)
        if subject.unavailable:
            raise InputError(f"{subject.backend.name} cannot run here: {'; '.join(subject.unavailable)}")
        for space in SPACES.values():
            for line in _declared(subject, space) if space.role in subject.roles else ():
                say(line)
    return 0


def _declared(subject: Subject, space: Space) -> Iterator[str]:
    """How much of the space is claimed, how many triples the tiers hold, and the classes that are refused."""
    region = region_of(subject, space, triples=True)
    classes, triples = region.classes, region.triples
    claimed, pairs = sum(map(len, classes.values())), len(Pairs(space, region.rows))
    refused = [(name, label) for name, label in space.values if label not in classes[name]]
    said = f"{claimed} of {len(space.values)} classes and {pairs:,} pairs claimed, {len(region.cases)} cases fitted"
    yield from wrapped(f"{subject.backend.name} {space.role}: {said}", 0)
    if triples:
        left = triples.claimed - triples.held - triples.vain
        text = (
            f"{triples.claimed:,} triples claimed two by two: full {triples.before:,}, nightly {triples.held:,}; no "
            f"row found for {triples.vain:,}, {left:,} left out behind {MOST_TRIPLES} cases"
        )
        yield from wrapped(text, 2)
    if refused:
        yield from wrapped(f"refused on {subject.device.type}: {', '.join(map('='.join, refused))}", 2)
