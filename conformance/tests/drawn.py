"""Cases that tests draw from the spaces of the roles, as ``--explore`` does."""

from collections.abc import Sequence

from hypothesis import strategies as st

from mla_conformance.cases.case import Case
from mla_conformance.cases.strategies import cases
from mla_conformance.cases.work import CPU_WORK, work_of
from mla_conformance.vocabulary.arrays import SPACES


def any_case() -> st.SearchStrategy[Case]:
    """Of any role, from its whole space."""
    whole = {name: {each.name: list(each.classes) for each in space.dimensions} for name, space in SPACES.items()}
    return st.one_of(*(cases(SPACES[name], classes) for name, classes in whole.items()))


def little_work(capability: str, **some: Sequence[str]) -> st.SearchStrategy[Case]:
    """Of one role, in classes of little work.

    Args:
        capability: the role's space by the capability of its arrays.
        some: of dimensions other classes than those.
    """
    space = SPACES[capability]
    known = {**space.small, **some}
    drawn = cases(space, {each.name: known.get(each.name, list(each.classes)) for each in space.dimensions})
    return drawn.filter(lambda case: work_of(case) <= CPU_WORK / 2)
