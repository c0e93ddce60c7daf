"""The shards of one list put together again."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import reduce

from mla_conformance.cases.sharding import Shard
from mla_conformance.files.inputs import InputError
from mla_conformance.judging.facts import BackendFacts, Traced
from mla_conformance.judging.record import EXPLORED
from mla_conformance.report.summary import BackendSummary, RunSummary, count_by_capability, summarise

_Named = tuple[str, Shard]


def merge_shards(runs: Sequence[RunSummary]) -> RunSummary:
    """The report of the whole list from those of all its shards.

    Raises:
        InputError: not shards of one list, mixed versions, devices or backends, an overlap, or a missing shard.
    """
    shards = [(run.source, _shard(run)) for run in runs]
    first, *others = runs
    for run in others:
        for what, expected, found in _traits(first, run):
            if expected != found:
                raise InputError(f"{run.source}: another {what} than in {first.source}: {found} instead of {expected}")
        if run.cases != first.cases:
            raise InputError(f"{run.source}: another list of cases than in {first.source}")
    _require_each_once(shards)
    _require_partition(shards, first.cases)
    position = {case: index for index, case in enumerate(first.cases)}
    parts = zip(*(run.backends for run in runs), strict=True)
    joined = tuple(_joined(part, position) for part in parts)
    return RunSummary(first.environment, joined, first.cases, date=max(run.date for run in runs))


def _shard(run: RunSummary) -> Shard:
    if run.shard is None:
        raise InputError(f"{run.source}: not a shard; merge expects reports of certify --shard i/n")
    if any(record.capability == EXPLORED for record in run.records):
        raise InputError(f"{run.source}: holds drawn cases, which no shard has")
    return run.shard


def _traits(first: RunSummary, run: RunSummary) -> Iterator[tuple[str, object, object]]:
    """What the shards of one list have in common, the most telling first: name, expected, found."""
    for key in dict.fromkeys([*first.environment, *run.environment]):
        yield key, first.environment.get(key), run.environment.get(key)
    yield "choice of backends", [b.name for b in first.backends], [b.name for b in run.backends]
    for mine, theirs in zip(first.backends, run.backends, strict=True):
        for field in fields(BackendFacts):
            yield f"{field.name} of {mine.name}", getattr(mine.facts, field.name), getattr(theirs.facts, field.name)


def _require_each_once(shards: Sequence[_Named]) -> None:
    counts = {shard.count for _, shard in shards}
    if len(counts) > 1:
        raise InputError(f"shards of different divisions: {', '.join(str(shard) for _, shard in shards)}")
    holder: dict[int, str] = {}
    for name, shard in shards:
        if shard.index in holder:
            raise InputError(f"{name}: shard {shard} a second time, after {holder[shard.index]}")
        holder[shard.index] = name
    (count,) = counts
    missing = [f"{index}/{count}" for index in range(1, count + 1) if index not in holder]
    if missing:
        raise InputError(f"{', '.join(holder.values())}: missing shard {', '.join(missing)}")


def _require_partition(shards: Sequence[_Named], cases: Sequence[str]) -> None:
    """Every case of the list in exactly one shard."""
    owner: dict[str, str] = {}
    for name, shard in shards:
        for case in shard.cases:
            if case in owner:
                raise InputError(f"{name}: overlaps with {owner[case]}: both hold {case}")
            owner[case] = name
    absent = [case for case in cases if case not in owner]
    if absent:
        raise InputError(f"{len(absent)} cases of the list are in no shard, the first is {absent[0]}")


def _joined(parts: Sequence[BackendSummary], position: dict[str, int]) -> BackendSummary:
    records = sorted((record for part in parts for record in part.records), key=lambda record: position[record.case])
    first = parts[0]
    if first.reasons:
        return first
    stopped = "; ".join(dict.fromkeys(part.stopped for part in parts if part.stopped))
    traced = reduce(Traced.joined, (part.traced for part in parts))
    heat = {case: heat_map for part in parts for case, heat_map in part.heat.items()}
    return BackendSummary(first.facts, summarise(records, count_by_capability(position)), stopped, traced, heat)
