"""How the passes of a run use their error budget: distributions, and the cases that came closest to the limit."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.summary import BackendSummary

RULES = {"element": "each element", "row": "each row", "lse": "each LSE"}
BINS = 20


@dataclass(frozen=True)
class Distribution:
    """Shares of the budget of one rule over the passes of one backend.

    Attributes:
        rule: a key of :data:`RULES`.
        shares: one per passed case that the rule applied to; 1 is the limit.
    """

    rule: str
    shares: tuple[float, ...]

    @cached_property
    def bins(self) -> list[int]:
        """Cases per twentieth of the budget."""
        counts = [0] * BINS
        for share in self.shares:
            counts[min(int(share * BINS), BINS - 1)] += 1
        return counts

    @property
    def title(self) -> str:
        """What the rule bounds."""
        return RULES.get(self.rule, self.rule)

    @property
    def words(self) -> str:
        """The distribution for a person who does not see it."""
        return f"{len(self.shares)} cases, median {statistics.median(self.shares):.2f}, largest {max(self.shares):.2f}"


def distributions(backend: BackendSummary) -> list[Distribution]:
    """One per rule that applied to a pass."""
    used = [record.shares for record in backend.records if record.status is Status.PASS]
    shares = {rule: tuple(share[rule] for share in used if share.get(rule)) for rule in RULES}
    return [Distribution(rule, found) for rule, found in shares.items() if found]


@dataclass(frozen=True)
class Closest:
    """A pass near the limit: the rule that it used most of, and the share."""

    record: Record
    rule: str
    share: float


def closest(backends: Sequence[BackendSummary], count: int) -> list[Closest]:
    """The passes with the largest share of their budget, the largest first."""
    passes = (r for backend in backends for r in backend.records if r.status is Status.PASS and any(r.shares.values()))
    found = [Closest(record, *max(record.shares.items(), key=lambda item: item[1])) for record in passes]
    return sorted(found, key=lambda case: -case.share)[:count]
