"""What a gate was not shown: reports, backends, shards, capabilities and cases that are not there."""

from collections.abc import Iterator, Sequence

from mla_conformance.cases.sharding import Shard
from mla_conformance.gating.row import Finding, Row
from mla_conformance.judging.record import EXPLORED
from mla_conformance.judging.verdict import Status
from mla_conformance.report.summary import BackendSummary, RunSummary, count_by_capability
from mla_conformance.report.terminal import counted
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier

_UNJUDGED = (Status.UNSUPPORTED, Status.UNAVAILABLE)


def missing(reports: Sequence[RunSummary], absent: Sequence[str], required: Sequence[str]) -> Iterator[Row]:
    """Reports that were named, backends that were required, and shards whose siblings are there.

    Args:
        reports: those that are there.
        absent: those that are not.
        required: names of backends that have to be judged.
    """
    for name in absent:
        yield Row(Finding.MISSING, "*", name, "no such report: did its job end before it wrote one?")
    found = _by_backend(reports)
    for name in required:
        if reason := _unjudged([backend for _, backend in found.get(name, [])]):
            yield Row(Finding.MISSING, name, "*", reason)
    for name, parts in found.items():
        for shard in _missing_shards([report.shard for report, _ in parts if report.shard]):
            yield Row(Finding.MISSING, name, f"shard {shard}", "in no report")


def incomplete(reports: Sequence[RunSummary], tier: Tier | None) -> Iterator[Row]:
    """Backends of whose list something has no verdict, each with how much has one; and a run that judged nothing.

    Args:
        reports: each may be of one shard of a list.
        tier: the tier whose cases belong to the list of every backend; None for what the reports list themselves.
    """
    cases = [case.id for entry in CAPABILITIES.values() for case in entry.select(tier)] if tier else []
    for name, parts in _by_backend(reports).items():
        run = [(report, backend) for report, backend in parts if not backend.reasons]
        listed = dict.fromkeys(key for report, backend in run for key in report.keys_of(backend))
        judged = {record.key for _, backend in run for record in backend.records}
        wanted = [*dict.fromkeys([*cases, *listed])] if run else []
        if left := [key for key in wanted if key not in judged]:
            of_what = f"of the {tier} tier" if tier else "of its list"
            yield Row(Finding.INCOMPLETE, name, _extent(wanted, left), of_what, cases=0)
        for capability, count in count_by_capability(left).items():
            yield Row(
                Finding.INCOMPLETE, name, capability, f"{counted(count, 'case')} of the list without a verdict", count
            )
    if not any(report.records for report in reports):
        yield Row(Finding.INCOMPLETE, "*", "*", "nothing was judged")


def _by_backend(reports: Sequence[RunSummary]) -> dict[str, list[tuple[RunSummary, BackendSummary]]]:
    found: dict[str, list[tuple[RunSummary, BackendSummary]]] = {}
    for report in reports:
        for backend in report.backends:
            found.setdefault(backend.name, []).append((report, backend))
    return found


def _unjudged(parts: Sequence[BackendSummary]) -> str:
    """Why a backend does not count as judged; empty if it does."""
    if not parts:
        return "in no report"
    if any(record.status not in _UNJUDGED for backend in parts for record in backend.records):
        return ""
    reasons = dict.fromkeys(reason for backend in parts for reason in backend.reasons)
    return f"unavailable: {'; '.join(reasons)}" if reasons else "nothing of it was judged"


def _missing_shards(shards: Sequence[Shard]) -> Iterator[str]:
    present: dict[int, set[int]] = {}
    for shard in shards:
        present.setdefault(shard.count, set()).add(shard.index)
    for count, indices in present.items():
        yield from (f"{index}/{count}" for index in range(1, count + 1) if index not in indices)


def _extent(wanted: Sequence[str], left: Sequence[str]) -> str:
    """How much of a list has a verdict: cases, and capabilities all of whose cases have one."""
    wanted, left = ([key for key in keys if key != EXPLORED] for keys in (wanted, left))
    capabilities, lacking = count_by_capability(wanted), count_by_capability(left)
    whole = len(capabilities) - len(lacking)
    return f"{len(wanted) - len(left)} of {len(wanted)} cases, {whole} of {len(capabilities)} capabilities"
