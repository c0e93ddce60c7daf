"""What is wrong with each function of a pytest run, in a few lines: its causes, and in which kind of cases."""

import shlex
from collections.abc import Iterator, Sequence

from mla_conformance.backends.foreign import cut
from mla_conformance.judging.record import Record
from mla_conformance.report.causes import Cause, advice, causes, circumstances, raised_at
from mla_conformance.report.terminal import columns, counted, wrapped

_MOST_CAUSES = 3
_INDENT = " " * 5
_KEPT = (
    "passes when run alone: the function keeps something from earlier calls (a plan, lengths, buffers), or equal calls "
    "give different results"
)


def simplest(records: Sequence[Record]) -> Record:
    """The simplest failing case of a function, of which at least one fails."""
    return Cause("", tuple(record for record in records if record.failed)).example


def function_lines(name: str, records: Sequence[Record], passes_alone: bool) -> Iterator[str]:
    """What is wrong with the function of a test of this name.

    Args:
        records: of its cases, each with the id of its test as reference.
        passes_alone: whether its simplest failing case passes in a process of its own.
    """
    failing, found = tuple(record for record in records if record.failed), causes(records)
    likely = sum(cause.kind == "likely" for cause in found)
    head = f"{name}: {len(failing)} of {counted(len(records), 'case')} fail"
    common = "" if passes_alone else circumstances(failing, records)
    if passes_alone:
        yield from wrapped(head, columns(), further=_INDENT)
        yield from _cause("", Cause(_KEPT, failing), common, failing[0].reference.partition("[")[0])
        return
    yield from wrapped(f"{head}, {counted(likely, 'likely cause')}" if likely else head, columns(), further=_INDENT)
    yield from wrapped(common, columns(), _INDENT, _INDENT)
    for number, cause in enumerate(found[:_MOST_CAUSES], start=1):
        cases = f"{number}. {counted(len(cause.failures), 'case')}{cause.reserve}: "
        yield from _cause(cases, cause, "" if common else cause.only, cause.example.reference)
    if hidden := sum(len(cause.failures) for cause in found[_MOST_CAUSES:]):
        yield f"  … and {counted(hidden, 'more case')}"


def _cause(cases: str, cause: Cause, only: str, test: str) -> Iterator[str]:
    """A cause, with what was seen of its simplest case where that says more."""
    said, _, _ = cause.example.message.removesuffix(f" (SPEC {cause.example.clause})").partition(", first at")
    seen = "" if cause.example.is_explained or said.endswith(cause.sentence) else f"simplest: {cut(said)}"
    yield from wrapped(f"{cases}{cut(cause.sentence)}", columns(), "  ", _INDENT)
    for detail in (only, seen, raised_at(cause.example), advice(cause.example)):
        yield from wrapped(detail, columns(), _INDENT, _INDENT)
    yield f"{_INDENT}replay: pytest {shlex.quote(test)}"
