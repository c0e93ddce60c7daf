"""What a new version changes: the changes between two runs, whether they speak against it, and that for people."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from packaging.utils import canonicalize_name

from mla_conformance.bump.version import Pin
from mla_conformance.files.whole import InputError
from mla_conformance.judging.verdict import Status
from mla_conformance.report.ci_views import inline
from mla_conformance.report.differences import DRIFT, Change, compare, differing
from mla_conformance.report.summary import BackendSummary, RunSummary
from mla_conformance.report.terminal import counted
from mla_conformance.speed.times import Speed, columns_of

_REGRESSED, _NOTHING_JUDGED = 1, 3
_SHOWN = 20  # changes of a kind that are shown; the others stand in the two reports


@dataclass(frozen=True)
class JudgedVersion:
    pin: Pin  # the library and its version
    run: RunSummary  # what was found
    # of it and of what was installed for either version, as they are found here; empty if one is not
    versions: dict[str, str]

    def require_loaded(self) -> None:
        """Make sure that every backend that was judged says that it stands on this version."""
        for backend in self.run.backends:
            reported = {canonicalize_name(name): version for name, version in backend.facts.versions.items()}
            if not backend.reasons and not self.pin.admits(reported.get(self.pin.name, "")):
                raise InputError(
                    f"{self.run.source}: expected {backend.name} to stand on {self.pin}, got "
                    f"{', '.join(f'{name} {version}' for name, version in reported.items()) or 'no distribution'}; "
                    "a backend names what it stands on in Declaration.distributions"
                )


@dataclass(frozen=True)
class Bump:
    before: JudgedVersion  # the old version
    after: JudgedVersion  # the new one

    @cached_property
    def pairs(self) -> tuple[tuple[BackendSummary, BackendSummary], ...]:
        return tuple(zip(self.before.run.backends, self.after.run.backends, strict=True))

    @cached_property
    def unjudged(self) -> dict[str, str]:
        """Backends of which the runs do not tell what the new version changes, each with why."""
        found = dict[str, str]()
        for old, new in self.pairs:
            said = []
            for judged, backend in ((self.before, old), (self.after, new)):
                if backend.reasons:
                    said.append(f"unavailable with {judged.pin.version}: {'; '.join(backend.reasons)}")
                elif backend.not_run:
                    said.append(f"with {judged.pin.version} {backend.not_run}")
            if not (old.reasons or new.reasons or old.counts.passed or new.counts.passed):
                said.append("no case passed with either version, so none could newly fail")
            found |= {old.name: "; ".join(said)} if said else {}
        return found

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """What changed, regressions first; without a backend that the old version cannot run."""
        unknown = {old.name for old, _ in self.pairs if old.reasons}
        return tuple(change for change in compare(self.before.run, self.after.run) if change.backend not in unknown)

    @property
    def exit_status(self) -> int:
        """0: no regression; 1: something is worse; 3: of some backend nothing, or not everything, could be judged."""
        regressed = any(change.regression for change in self.changes)
        return _REGRESSED if regressed else _NOTHING_JUDGED if self.unjudged else 0

    @cached_property
    def alike(self) -> tuple[int, int]:
        """How many cases pass with both versions, and how many fail with both, before any expectation."""
        passing = failing = 0
        for old, new in self.pairs:
            before, after = ({record.key: record.as_judged for record in each.records} for each in (old, new))
            both = [(before[key], after[key]) for key in before.keys() & after.keys()]
            passing += sum(was.status is now.status is Status.PASS for was, now in both)
            failing += sum(was.failed and now.failed for was, now in both)
        return passing, failing


def bump_lines(bump: Bump) -> Iterator[str]:
    """The verdict, last, and before it everything that it follows from."""
    yield from (f"{name} {before} → {after}" for name, before, after in _versions(bump))
    for old, new in bump.pairs:
        yield f"{old.name} {_counts(old)} → {_counts(new)}"
    yield from (f"{name} {shape} {before} → {after}" for name, shape, before, after in _times(bump))
    for changes, hidden in _by_kind(bump):
        yield from (change.line for change in changes)
        yield from [f"  … and {hidden} more {changes[0].kind}"] if hidden else []
    yield from (f"? {name}: {why}" for name, why in bump.unjudged.items())
    yield sentence(bump)


def bump_markdown(bump: Bump) -> str:
    """The same, the verdict first."""
    old, new = bump.before.pin, bump.after.pin
    title = inline(f"{old.name} {old.version} → {new.version}")
    lines = [f"## MLA conformance: {title}", "", inline(sentence(bump)), ""]
    lines += _table(["installed", "before", "after"], _versions(bump))
    lines += _table(["backend", "before", "after"], [(old.name, _counts(old), _counts(new)) for old, new in bump.pairs])
    if times := _times(bump):
        lines += _table(["backend", "time", "before", "after"], times)
    for changes, hidden in _by_kind(bump):
        lines += [f"### {'❌' if changes[0].regression else '➖'} {changes[0].kind} ({len(changes) + hidden})", ""]
        lines += _table(["backend", "case", "what"], [(c.backend, c.key, c.detail) for c in changes])
    lines += _table(["not judged", "why"], bump.unjudged.items()) if bump.unjudged else []
    facts = " · ".join(f"{name} {value}" for name, value in bump.after.run.environment.items() if value)
    return "\n".join([*lines, f"<sub>{inline(facts)}</sub>", ""])


def sentence(bump: Bump) -> str:
    passing, failing = bump.alike
    alike = f"pass with both: {counted(passing, 'case')}" + (f", fail with both: {failing}" if failing else "")
    if not bump.exit_status:
        return f"no regression · {alike} · none newly fails, is missing or uses over {DRIFT} more of its error budget"
    kinds = [f"{len(changes) + hidden} {changes[0].kind}" for changes, hidden in _by_kind(bump)]
    verdict = "REGRESSED" if bump.exit_status == _REGRESSED else "NOT JUDGED"
    return " · ".join([verdict, *kinds, alike, *(f"{name} could not be compared" for name in bump.unjudged)])


def _by_kind(bump: Bump) -> Iterator[tuple[list[Change], int]]:
    """The first changes of each kind, and how many more there are."""
    for _, group in groupby(bump.changes, key=lambda change: change.kind):
        changes = list(group)
        yield changes[:_SHOWN], len(changes[_SHOWN:])


def _versions(bump: Bump) -> list[tuple[str, str, str]]:
    """The library first, then whatever else of what was installed for it is not the same with both."""
    found = differing(bump.before.versions, bump.after.versions)
    return [(name, old or "none", new or "none") for name, old, new in found]


def _times(bump: Bump) -> list[tuple[str, str, str, str]]:
    """Of each backend that was timed the shapes of the table, with both versions; they decide nothing."""
    rows = []
    for pair in bump.pairs:
        timed = [each.speed or Speed() for each in pair]
        for shape in columns_of([(each.name, speed) for each, speed in zip(pair, timed, strict=True)]):
            before, after = (str(found.best) if (found := speed.of(shape)) else "no time" for speed in timed)
            rows.append((pair[0].name, shape, before, after))
    return rows


def _counts(backend: BackendSummary) -> str:
    if backend.reasons:
        return "unavailable"
    counts = backend.counts
    more = counts.noted(failed="failed", waived="expected to fail", not_run="NOT RUN", unsupported="unsupported")
    return ", ".join([f"{counts.passed}/{counts.judged} passed", *more])


def _table(head: Sequence[str], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [head, ["---"] * len(head), *([inline(cell) for cell in row] for row in rows)]
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]
