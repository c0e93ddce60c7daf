"""``capabilities --backend``: the pairs of values that no case of the full tier has which the backend supports."""

import textwrap
from collections.abc import Iterator, Sequence

from mla_conformance.cases.combinations import PAIRS, Combination, Space
from mla_conformance.engine.describe import find_device
from mla_conformance.engine.request import RunRequest
from mla_conformance.files.inputs import InputError
from mla_conformance.files.places import search_current_folder
from mla_conformance.report.terminal import say
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.capabilities import CAPABILITIES, SPACES

_WIDTH = 80


def list_unreached(reference: str, device: str | None) -> int:
    """What the backend's declared support leaves unreached, role by role.

    Raises:
        InputError: it names no backend, or one that cannot run here.
    """
    request = RunRequest.of([reference], device=device)
    found = find_device(request.device)
    if found is None:
        raise InputError("--device cuda: torch sees no CUDA device; use --device cpu")
    search_current_folder()
    for backend in request.backends:
        for line in _lines(Subject(backend, found)):
            say(line)
    return 0


def _lines(subject: Subject) -> Iterator[str]:
    if subject.unavailable:
        raise InputError(f"{subject.name} cannot run here: {'; '.join(subject.unavailable)}")
    for space in SPACES.values():
        if space.role in subject.roles:
            yield from _unreached(subject, space)


def _unreached(subject: Subject, space: Space) -> Iterator[str]:
    """A headline, the values that no supported case has, and for each other value those it never meets."""
    cases = [case for capability in CAPABILITIES.values() for case in capability.cases if space.counts(case)]
    supported = [case for case in cases if not subject.missing_role(case) and not subject.unsupported(case)]
    without = [value for combination in space.lacking(supported, 1) for value in combination]
    pairs = [pair for pair in space.lacking(supported, PAIRS) if not pair.intersection(without)]
    yield (
        f"{subject.name} {space.role}: {len(supported)} of {len(cases)} cases supported, "
        f"{len(without)} values and {len(pairs)} pairs of the others unreached"
    )
    if without:
        yield from _wrapped("no case:", without)
    yield from _partners(pairs, space)


def _partners(pairs: Sequence[Combination], space: Space) -> Iterator[str]:
    order = list(space.dimensions)
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for pair in pairs:
        first, second = sorted(pair, key=lambda value: order.index(value[0]))
        found.setdefault(first, []).append(second)
    for first, others in found.items():
        yield from _wrapped(f"{_named(first)} never with", others)


def _wrapped(head: str, values: Sequence[tuple[str, str]]) -> list[str]:
    text = f"{head} {', '.join(map(_named, values))}"
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _named(value: tuple[str, str]) -> str:
    return "=".join(value)
