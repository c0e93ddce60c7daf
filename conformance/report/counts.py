"""How the cases of a list ended, counted: the only place where statuses become numbers."""

from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import FAILED, Status

_K = TypeVar("_K")
_T = TypeVar("_T")
Number = Annotated[int, Meta(ge=0, le=2**53)]


class Counts(Struct, frozen=True):
    """Cases by what became of them; all but ``listed`` exclude each other and add up to it.

    Attributes:
        listed: cases of the list.
        passed: judged right.
        failed: failed, crashed, hung, passed against an expectation, or not judged for a fault of the harness.
        unsupported: declared unsupported.
        unavailable: not judged here, for want of memory.
        waived: failed as an expectation says.
        not_run: without a record.
    """

    listed: Number = 0
    passed: Number = 0
    failed: Number = 0
    unsupported: Number = 0
    unavailable: Number = 0
    waived: Number = 0
    not_run: Number = 0

    @staticmethod
    def of(records: Iterable[Record], listed: int = 0) -> "Counts":
        """The counts of records, of which a list wants ``listed`` at least; a record may stand for several cases."""
        found: dict[str, int] = {}
        for record in records:
            name = _NAMES[record.status]
            found[name] = found.get(name, 0) + record.cases
        run = sum(found.values())
        return Counts(listed=max(listed, run), not_run=max(listed - run, 0), **found)

    @property
    def run(self) -> int:
        """Cases with a verdict."""
        return self.listed - self.not_run

    @property
    def judged(self) -> int:
        """The denominator: cases that were to be judged, without those that are declared unsupported."""
        return self.listed - self.unsupported

    def noted(self, **words: str) -> list[str]:
        """Those of these counts that are not 0, in this order, each with its words."""
        return [f"{number} {said}" for name, said in words.items() if (number := getattr(self, name))]

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, name) + getattr(other, name) for name in Counts.__struct_fields__))


_NAMES = {
    Status.PASS: "passed",
    Status.UNSUPPORTED: "unsupported",
    Status.UNAVAILABLE: "unavailable",
    Status.EXPECTED_FAILURE: "waived",
    **dict.fromkeys(FAILED, "failed"),
}


def grouped(found: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """What has a key in common, in order of appearance."""
    groups: dict[_K, list[_T]] = {}
    for each in found:
        groups.setdefault(key(each), []).append(each)
    return groups
