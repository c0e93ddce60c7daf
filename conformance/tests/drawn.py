"""Cases that tests draw from the spaces of the roles, as ``--explore`` does, and what is judged of a case on a CPU."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st

from mla_conformance.backends.roles import role_of
from mla_conformance.cases.case import Case
from mla_conformance.cases.work import CPU_WORK, work_of
from mla_conformance.judging.record import Record
from mla_conformance.trials.explore import cases
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, judge_one
from mla_conformance.vocabulary.arrays import SPACES

CPU, CONTEXT = torch.device("cpu"), Context()


def changed(base: type, **steps: Callable[..., Any]) -> type:
    """A kernel whose methods of these names are handed the base's own first, as in ``run_decode=lambda run, *x: …``."""

    def method(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *operands, **options: step(partial(getattr(base, name), self), *operands, **options)

    return type(base.__name__, (base,), {name: method(name, step) for name, step in steps.items()})


def subject_of(kernel: type | str) -> Subject:
    if isinstance(kernel, str):
        return Subject.of(kernel, CPU)
    if getattr(sys.modules[kernel.__module__], kernel.__qualname__, None) is kernel:
        return Subject.of(f"{kernel.__module__}:{kernel.__qualname__}", CPU)
    subject = Subject.of("EAGER", CPU)
    subject._classes[role_of(kernel)] = kernel
    return subject


def judged(kernel: type | str, case: Case | str, context: Context = CONTEXT) -> Record:
    return judge_one(subject_of(kernel), Case.parse(case) if isinstance(case, str) else case, context)


def any_case() -> st.SearchStrategy[Case]:
    whole = {name: {each.name: list(each.classes) for each in space.dimensions} for name, space in SPACES.items()}
    return st.one_of(*(cases(SPACES[name], classes) for name, classes in whole.items()))


def little_work(capability: str, **some: Sequence[str]) -> st.SearchStrategy[Case]:
    """Of one role, named by the capability of its arrays, in classes of little work but for ``some``."""
    space = SPACES[capability]
    known = {**space.small, **some}
    drawn = cases(space, {each.name: known.get(each.name, list(each.classes)) for each in space.dimensions})
    return drawn.filter(lambda case: work_of(case) <= CPU_WORK / 2)
