"""What a new version changes, for people: as lines for a terminal, and as Markdown for a pull request."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from mla_conformance.bump.outcome import NOT_INNOCENT, Bump
from mla_conformance.report.ci_views import inline
from mla_conformance.report.compare import DRIFT, Change
from mla_conformance.report.summary import BackendSummary
from mla_conformance.report.terminal import counted

_SHOWN = 20
"""Changes of a kind that are shown; the others stand in the two reports."""


def bump_lines(bump: Bump) -> Iterator[str]:
    """The verdict, last, and before it everything that it follows from."""
    yield from (f"{name} {before} → {after}" for name, before, after in _versions(bump))
    for old, new in bump.pairs:
        yield f"{old.name} {_counts(old)} → {_counts(new)}"
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
    for changes, hidden in _by_kind(bump):
        lines += [f"### {'❌' if changes[0].regression else '➖'} {changes[0].kind} ({len(changes) + hidden})", ""]
        lines += _table(["backend", "case", "what"], [(c.backend, c.key, c.detail) for c in changes])
    lines += _table(["not judged", "why"], bump.unjudged.items()) if bump.unjudged else []
    facts = " · ".join(f"{name} {value}" for name, value in bump.after.run.environment.items())
    return "\n".join([*lines, f"<sub>{inline(facts)}</sub>", ""])


def sentence(bump: Bump) -> str:
    """The verdict and what it stands on."""
    passing, failing = bump.alike
    alike = f"pass with both: {counted(passing, 'case')}" + (f", fail with both: {failing}" if failing else "")
    if not bump.exit_status:
        return f"innocent · {alike} · none newly fails, is missing or uses over {DRIFT} more of its error budget"
    kinds = [f"{len(changes) + hidden} {changes[0].kind}" for changes, hidden in _by_kind(bump)]
    verdict = "NOT INNOCENT" if bump.exit_status == NOT_INNOCENT else "NOT JUDGED"
    return " · ".join([verdict, *kinds, alike, *(f"{name} could not be compared" for name in bump.unjudged)])


def _by_kind(bump: Bump) -> Iterator[tuple[list[Change], int]]:
    """The first changes of each kind, and how many more there are."""
    for _, group in groupby(bump.changes, key=lambda change: change.kind):
        changes = list(group)
        yield changes[:_SHOWN], len(changes[_SHOWN:])


def _versions(bump: Bump) -> list[tuple[str, str, str]]:
    """The library first, then whatever else of what was installed for it is not the same with both."""
    old, new = bump.before.versions, bump.after.versions
    return [(name, old[name] or "none", new[name] or "none") for name in old if old[name] != new[name]]


def _counts(backend: BackendSummary) -> str:
    if backend.reasons:
        return "unavailable"
    counts = backend.counts
    more = [f"{counts.failed} failed"] if counts.failed else []
    more += [f"{counts.waived} expected to fail"] if counts.waived else []
    more += [f"{counts.not_run} NOT RUN"] if counts.not_run else []
    more += [f"{counts.unsupported} unsupported"] if counts.unsupported else []
    return ", ".join([f"{counts.passed}/{counts.judged} passed", *more])


def _table(head: Sequence[str], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [head, ["---"] * len(head), *([inline(cell) for cell in row] for row in rows)]
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]
