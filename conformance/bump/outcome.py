"""What a new version changes: the changes between two runs, and whether they speak against it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from packaging.utils import canonicalize_name

from mla_conformance.bump.pin import Pin
from mla_conformance.files.inputs import InputError
from mla_conformance.judging.verdict import Status
from mla_conformance.report.compare import Change, compare
from mla_conformance.report.summary import BackendSummary, RunSummary

NOT_INNOCENT, NOTHING_JUDGED = 1, 3


@dataclass(frozen=True)
class Judged:
    """One version, judged.

    Attributes:
        pin: the library and its version.
        run: what was found.
        versions: of it and of what was installed for either version, as they are found here; empty if one is not.
    """

    pin: Pin
    run: RunSummary
    versions: dict[str, str]

    def require_loaded(self) -> None:
        """Make sure that every backend that was judged says that it stands on this version.

        Raises:
            InputError: one does not.
        """
        for backend in self.run.backends:
            told = {canonicalize_name(name): version for name, version in backend.facts.versions.items()}
            if not backend.reasons and not self.pin.admits(told.get(self.pin.name, "")):
                raise InputError(
                    f"{self.run.source}: expected {backend.name} to stand on {self.pin}, got "
                    f"{', '.join(f'{name} {version}' for name, version in told.items()) or 'no distribution'}; "
                    "a backend names what it stands on in Declaration.distributions"
                )


@dataclass(frozen=True)
class Bump:
    """A library's way from one version to another.

    Attributes:
        before: the old version.
        after: the new one.
    """

    before: Judged
    after: Judged

    @cached_property
    def pairs(self) -> tuple[tuple[BackendSummary, BackendSummary], ...]:
        """Every backend with the old and with the new version."""
        return tuple(zip(self.before.run.backends, self.after.run.backends, strict=True))

    @cached_property
    def unjudged(self) -> dict[str, str]:
        """Backends of which the runs do not tell what the new version changes, each with why."""
        return {old.name: why for old, new in self.pairs if (why := "; ".join(self._missing(old, new)))}

    def _missing(self, old: BackendSummary, new: BackendSummary) -> Iterator[str]:
        for judged, backend in ((self.before, old), (self.after, new)):
            if backend.reasons:
                yield f"unavailable with {judged.pin.version}: {'; '.join(backend.reasons)}"
            elif backend.not_run:
                yield f"with {judged.pin.version} {backend.not_run}"
        if not (old.reasons or new.reasons or old.counts.passed or new.counts.passed):
            yield "no case passed with either version, so none could newly fail"

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """What changed, regressions first; without a backend that the old version cannot run."""
        unknown = {old.name for old, _ in self.pairs if old.reasons}
        return tuple(change for change in compare(self.before.run, self.after.run) if change.backend not in unknown)

    @property
    def regressions(self) -> int:
        """Changes that make the new version worse."""
        return sum(change.regression for change in self.changes)

    @property
    def exit_status(self) -> int:
        """0: innocent; 1: something is worse; 3: of some backend nothing, or not everything, could be judged."""
        return NOT_INNOCENT if self.regressions else NOTHING_JUDGED if self.unjudged else 0

    @cached_property
    def alike(self) -> tuple[int, int]:
        """How many cases pass with both versions, and how many fail with both."""
        both = [(_passed_and_failed(old), _passed_and_failed(new)) for old, new in self.pairs]
        return sum(len(o[0] & n[0]) for o, n in both), sum(len(o[1] & n[1]) for o, n in both)


def _passed_and_failed(backend: BackendSummary) -> tuple[set[str], set[str]]:
    """Keys of the records, before any expectation."""
    records = [record.as_judged for record in backend.records]
    return {r.key for r in records if r.status is Status.PASS}, {r.key for r in records if r.failed}
