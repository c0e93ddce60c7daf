"""Cases that tests draw from the spaces of the roles, as ``--explore`` does, and what is judged of a case on a CPU."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from mla_conformance.cases.case import Case
from mla_conformance.cases.strategies import cases
from mla_conformance.cases.work import CPU_WORK, work_of
from mla_conformance.judging.record import Record
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, judge_one
from mla_conformance.vocabulary.arrays import SPACES

CPU, CONTEXT = torch.device("cpu"), Context()


def subject_of(kernel: type | str) -> Subject:
    """A class of a module, or what a reference names, on the CPU."""
    return Subject.of(kernel if isinstance(kernel, str) else f"{kernel.__module__}:{kernel.__qualname__}", CPU)


def judged(kernel: type | str, case: Case | str, context: Context = CONTEXT) -> Record:
    """The record of a case, or of the one with this id, on a class of a module, or on what a reference names."""
    return judge_one(subject_of(kernel), Case.parse(case) if isinstance(case, str) else case, context)


def any_case() -> st.SearchStrategy[Case]:
    """Of any role, from its whole space."""
    whole = {name: {each.name: list(each.classes) for each in space.dimensions} for name, space in SPACES.items()}
    return st.one_of(*(cases(SPACES[name], classes) for name, classes in whole.items()))


def little_work(capability: str, **some: Sequence[str]) -> st.SearchStrategy[Case]:
    """Of one role, named by the capability of its arrays, in classes of little work but for ``some``."""
    space = SPACES[capability]
    known = {**space.small, **some}
    drawn = cases(space, {each.name: known.get(each.name, list(each.classes)) for each in space.dimensions})
    return drawn.filter(lambda case: work_of(case) <= CPU_WORK / 2)
