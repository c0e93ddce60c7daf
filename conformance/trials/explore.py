"""Cases as hypothesis draws them from a space, and what comes of them; what fails is made small, once a cause.

Drawn are classes and members, never tensors, the plainest first.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from hypothesis import HealthCheck, Phase, Verbosity, given, reject, seed, settings
from hypothesis import strategies as st

from mla_conformance.cases import fitting
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cases.classes import Draw
from mla_conformance.cases.sharding import ROUND, Extent
from mla_conformance.cases.space import DATA, Row, Space
from mla_conformance.judging.explored import Explored, Pace, cause_of
from mla_conformance.judging.record import Record, Status
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, OnStarted, judge_one

_MOST_SEEDS, _MOST_KEYS = 100, 2**16
_MOST_REGIMES = 7  # that requests have beside the first one
_DRAWS = 8  # of members of a row's classes; the key 0 stands for the plainest, to which failures shrink


def profile(draws: int) -> settings:
    """The same ``draws`` cases in every run of a seed, and nothing but them: no setting leaks in."""
    return settings(
        max_examples=draws,
        derandomize=False,
        database=None,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate, Phase.shrink),
        stateful_step_count=1,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        deadline=None,
        print_blob=False,
        backend="hypothesis",
    )


@st.composite
def cases(draw: st.DrawFn, space: Space, classes: Mapping[str, Sequence[str]]) -> Case:
    """A case of a space; ``classes`` are those of each dimension that are drawn, one at least."""
    drawn = {name: draw(st.sampled_from(labels)) for name, labels in classes.items() if labels}

    def prefer(name: str, labels: Sequence[str], row: Row) -> list[str]:
        return sorted([label for label in labels if label in classes[name]], key=lambda label: label != drawn.get(name))

    row = space.completed((), prefer)
    if row is None:
        reject()
    fields = {"seed": draw(st.integers(0, _MOST_SEEDS)), "capability": space.capability}
    key = draw(st.integers(0, _MOST_KEYS))
    draws = [Draw(f"{key}|{number}" if key else "") for number in range(_DRAWS)]
    regimes = draw(st.lists(st.sampled_from(classes[DATA]), max_size=_MOST_REGIMES)) if space.regimes else []
    for each in draws:
        with suppress(CaseError):  # a rule that only single members of classes break
            case = space.case_of(row, each, fields)
            break
    else:
        reject()
    return replace(case, data="+".join((case.data, *regimes))) if len(case.q) > 1 else case


class _CaseFails(Exception):
    """How hypothesis learns that a drawn case, its argument, fails."""


def explore(
    subject: Subject,
    region: fitting.Region,
    extent: Extent,
    turn: tuple[int, int],
    context: Context,
    started: OnStarted = lambda case: None,
    so_far: Callable[[Explored], None] = lambda found: None,
) -> Explored:
    """What came of the cases that are drawn in a turn, (2, 5) for every fifth round from the third on.

    ``started`` is told of every case before anything of it is launched, ``so_far`` now and then, ever more rarely, what
    the answer would be if the last case had been the last. The cases of one seed are drawn after another, again behind
    each cause; what was judged is not judged again.
    """
    if not region.rows:
        return Explored()
    records, causes, pace = dict[str, Record](), dict[tuple[str, str], Record](), Pace()
    device_lost = False
    sought: tuple[str, str] | None = None

    def holds(case: Case) -> None:
        """Raise if a case fails by a cause that is not known yet; once one is found, by that one."""
        nonlocal device_lost, sought
        if case.id not in records and not device_lost:
            records[case.id] = judge_one(subject, case, context, started)
            device_lost = records[case.id].failed and subject.executor.lost(subject.device)
            if pace.is_due():
                so_far(Explored.of([*records.values()], [*causes.values()]))
        record = records.get(case.id)
        if record and record.failed and cause_of(record) not in causes:
            sought = sought or cause_of(record)
            if sought == cause_of(record):
                raise _CaseFails(case)
        if record and record.status is Status.UNSUPPORTED:
            reject()

    draws, (number, turns), until = extent.draws, turn, time.monotonic() + extent.seconds
    while (time.monotonic() < until if extent.seconds else number * ROUND < draws) and not device_lost:
        drawn = given(case=cases(region.space, region.classes))(holds)
        drawn = seed(number)(profile(min(ROUND, draws - number * ROUND) if draws else ROUND)(drawn))
        while len(causes) < 8 and not device_lost:
            sought = None
            try:
                drawn()
            except _CaseFails as found:
                (case,) = found.args
                first = records[case.id]
                # Its smallest case is run once more, where that is possible.
                again = first if device_lost else judge_one(subject, case, context, started)
                passed = first.with_fields(message=f"{first.message}; when run again the case passed")
                causes[cause_of(first)] = again if again.failed else passed
            else:
                break
        number += turns
    return Explored.of([*records.values()], [*causes.values()])
