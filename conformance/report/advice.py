"""What to do about a failure that nothing explains: one sentence beside what every view says of it. No torch."""

from mla_conformance.cases.case import Case
from mla_conformance.judging.record import UNCOMPARED, UNLIKE, Record
from mla_conformance.judging.verdict import Check

_ALONE = "run this case alone, by its replay line: there it has the time to be compared with all of them"
MOST_REQUESTS = 256
"""Cases of more requests are never compared."""
_RIGHT_LSE = (
    "the LSE is right, so scores, mask and scale are: look at V, at rescaling of the accumulator, or at the weights "
    "with which splits are merged"
)


def advice(record: Record) -> str:
    """Where to look, or what to run; empty where something explains a failure or nothing more is known of it."""
    if record.looks_like == UNCOMPARED:
        return _ALONE if len(Case.parse(record.case).q) <= MOST_REQUESTS else ""
    # The judge says so of an LSE that was asked for, whose every row is within its budget.
    right = record.check == Check.OUTPUT and "; the LSE is right" in record.message
    return _RIGHT_LSE if right and record.looks_like == UNLIKE else ""
