"""What a backend declares of the space of a role, on its device."""

from collections.abc import Sequence
from functools import partial
from itertools import compress

from mla_conformance.cases.case import Case
from mla_conformance.cases.covering import Pairs
from mla_conformance.cases.fitting import Region, fit
from mla_conformance.cases.space import Space
from mla_conformance.cases.work import CPU_WORK, is_light, work_of
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.capabilities import listed
from mla_conformance.vocabulary.grid import grid_cases


def region_of(subject: Subject, space: Space, triples: bool = False) -> Region:
    """The part of a space that a backend declares, and cases fitted to it, if asked for ``triples`` of classes as well.

    None of a role that it has not, or that cannot run here.
    """
    cases, device = listed(space), subject.device.type
    light = partial(is_light, device_type=device) if triples else None
    region = fit(space, cases, partial(_supported, subject), reachable(space, device), light)
    cells = grid_cases(space, region.classes) if region.rows else []
    listed_or_fitted = {*cases, *region.cases}
    further = [case for case in cells if case not in listed_or_fitted]
    region.cases += compress(further, _supported(subject, further) if further else ())
    return region


def reachable(space: Space, device_type: str) -> Pairs:
    """The pairs that cases hold which a device of this type is asked for."""
    light = (case for case in listed(space) if device_type != "cpu" or work_of(case) <= CPU_WORK)
    return Pairs(space, space.rows(light))


def _supported(subject: Subject, cases: Sequence[Case]) -> list[bool]:
    """Which of some cases it declares; nothing of what it raises when it is asked."""
    answered = subject.executor.query(partial(_asked, subject, tuple(cases)), list[bool])
    return answered.value if not answered.error else [False] * len(cases)


def _asked(subject: Subject, cases: Sequence[Case]) -> list[bool]:
    return [not subject.unsupported(case) for case in cases]
