"""Exploration: cases drawn from the whole space of a backend's roles; what fails is made small, once for each cause."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cases.fitting import Region
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.judging.verdict import BudgetUse, Status, Verdict
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import OnStarted, judge_one
from mla_conformance.trials.regions import region_of
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.arrays import SPACES

_ROUND = 200
"""Cases that are drawn from one seed."""
_MOST_CAUSES = 8


@dataclass(frozen=True)
class Extent:
    """How much is explored of each role.

    Attributes:
        draws: cases; 0 where time decides.
        seconds: that long; 0 where their number decides.
    """

    draws: int = 0
    seconds: float = 0.0


def explore(
    subject: Subject,
    extent: Extent,
    capabilities: tuple[str, ...],
    context: Context,
    started: OnStarted = lambda case: None,
) -> Record:
    """The record of a whole exploration: of all cases that hold, or of the smallest one found that fails.

    Args:
        subject: the backend on its device.
        extent: how much to draw.
        capabilities: of which spaces, by the capabilities that their arrays are of.
        context: what this process has made before.
        started: told of every case before anything of it is launched.
    """
    found = [_Exploration(subject, SPACES[name].role, extent, context, started) for name in capabilities]
    for each in found:
        each.search()
    return _summed(found, subject, context).with_fields(capability=EXPLORED)
