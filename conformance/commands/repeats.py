"""``replay --repeats``: many calls of one case, then of simpler ones that differ as well."""

import time
from collections.abc import Iterator

from mla_conformance.cases.case import Case
from mla_conformance.cases.shrink import simpler
from mla_conformance.commands.console import BROKEN, status_of
from mla_conformance.engine.folder import RUNS
from mla_conformance.engine.messages import Repeat
from mla_conformance.engine.request import RequestError
from mla_conformance.engine.run import Run
from mla_conformance.engine.supervisor import Stopped
from mla_conformance.engine.tasks import Tasks
from mla_conformance.files.inputs import InputError
from mla_conformance.judging.record import replay_line
from mla_conformance.judging.traits import Repeated
from mla_conformance.report.terminal import columns, say, wrapped
from mla_conformance.vocabulary.case_files import write_case

PROBABILITY = 0.95
"""With which a race is said to be found."""
_PATIENCE = 4
"""How much longer than the case itself simpler ones are repeated."""


def repeat(run: Run, calls: int) -> int:
    """Carry out a prepared run's one case so often, and say what was found; the exit status."""
    with run:
        try:
            run.prepare()
            (facts,), (case,) = run.facts, run.request.cases
            if facts.reasons:
                raise InputError(f"{facts.name} unavailable: {'; '.join(facts.reasons)}")
            found = _repeated(run, case, calls)
            smallest = _smallest(run, case, found) if found and found.breaks else case
        except RequestError as error:
            raise InputError(str(error)) from error
        except Stopped as stop:
            say(f"mla-conformance: ended by {stop}", error=True)
            return status_of(stop) or BROKEN
    for text in _lines(found, calls):
        for line in wrapped(text, columns()):
            say(line)
    if found is None or found.failed:
        return 1 if found is None else BROKEN
    if found.breaks:
        _keep(smallest, facts.reference, calls)
    return int(found.breaks)


def _repeated(run: Run, case: Case, calls: int) -> Repeated | None:
    """None if the process died of it."""
    (outcome,) = run.supervisor.run(Tasks([[Repeat(run.facts[0].reference, case.id, calls)]]))
    return outcome.answer.repeated


def _smallest(run: Run, case: Case, seen: Repeated) -> Case:
    """The simplest case that differs, one step after the other; a rare difference may not show in one that has it."""
    ends_at = time.monotonic() + _PATIENCE * seen.seconds
    candidates = simpler(case)
    while (candidate := next(candidates, None)) and time.monotonic() < ends_at:
        found = _repeated(run, candidate, seen.calls)
        if found and found.breaks:
            case, candidates = candidate, simpler(candidate)
    return case


def _lines(found: Repeated | None, calls: int) -> Iterator[str]:
    if found is None:
        yield f"the process died within {calls:,} calls"
    elif found.failed:
        yield f"not repeated: {found.failed}"
    elif not found.differing:
        rarest = found.rarest(PROBABILITY)
        yield (
            f"{found.calls:,} calls in {found.seconds:.1f} s, all with the same bits: what happens in more than one of "
            f"{1 / rarest:,.0f} calls would have shown with {PROBABILITY:.0%}"
        )
    else:
        yield (
            f"{found.differing:,} of {found.calls:,} calls in {found.seconds:.1f} s have other bits than the first, "
            f"beginning with call {found.first:,}: {found.what}; {found.wrong or 'within the error budget'}"
        )
        needed = found.calls_for(PROBABILITY)
        seconds = needed * found.seconds / found.calls
        yield f"to find one with {PROBABILITY:.0%}: {needed:,} calls, {seconds:.2g} s here"
        if not found.breaks:
            yield "the kernel does not declare equal bits: information, not a failure"


def _keep(case: Case, reference: str, calls: int) -> None:
    path = RUNS / f"race-{case.digest}.json"
    try:
        write_case(path, case)
    except OSError as error:
        raise InputError(f"--repeats: {error}") from error
    say(f"smallest case that differs: {path}")
    say(f"replay: {replay_line(case.id, reference)} --repeats {calls}")
