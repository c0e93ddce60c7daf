"""``bump``: two environments, a run of ``certify`` in each, and what the new version changes, in words for people."""

import argparse
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby

from packaging.utils import canonicalize_name

from mla_conformance.backends.references import parse_reference
from mla_conformance.bump.version import Environment, Pin, two_versions
from mla_conformance.engine.journal import RUNS
from mla_conformance.files.whole import InputError, write_output
from mla_conformance.judging.record import Status
from mla_conformance.report import ci_views, json_report, summary
from mla_conformance.report.differences import DRIFT, SHOWN, Change, change_lines, compare, differing
from mla_conformance.report.terminal import counted, say
from mla_conformance.speed.times import Speed, columns_of

_SIDES = "before", "after"


def bump(options: argparse.Namespace) -> int:
    pins = two_versions(options.before, options.after)
    if not options.backend:
        raise InputError(f"--backend: expected the backends that stand on {pins[0].name}, got none")

    from mla_conformance.backends.kernel import get_device_capability
    from mla_conformance.backends.loading import unavailable_reasons  # with torch
    from mla_conformance.engine.machine import find_device

    device = find_device(options.device or "")
    if device is None:
        raise InputError(f"--device {options.device}: torch finds no such device here; nothing was installed")
    for backend in map(parse_reference, options.backend):  # one without a kernel for it, before minutes of installing
        found = [unavailable_reasons(backend, get_device_capability(device), each.role) for each in backend.members()]
        lacking = [next((each for each in reasons if "compute capability" in each), "") for reasons in found]
        if lacking and all(lacking):
            raise InputError(f"--backend {backend.name}: {lacking[0]}; nothing was installed")
    out = options.out or RUNS / f"bump-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise InputError(f"--out {out}: expected a new or an empty folder")
    except OSError as error:
        raise InputError(f"--out {out}: expected a writable folder: {error.strerror}") from error
    # Both before anything is judged: a version that cannot be installed is known at once.
    environments = []
    for side, pin in zip(_SIDES, pins, strict=True):
        say(f"installing {pin}")
        environments.append(Environment.make((out / side).resolve() / "environment", pin, options.find_links))
        environments[-1].require_installed()
    names = list(dict.fromkeys([pins[0].name, *environments[0].added, *environments[1].added]))
    compared = Bump(*(_judged(environment, names, options) for environment in environments))
    say(*bump_lines(compared), f"reports {out / _SIDES[0]} {out / _SIDES[1]}")
    if options.markdown:
        write_output(options.markdown, bump_markdown(compared))
    return compared.exit_status


def _judged(environment: Environment, names: Sequence[str], options: argparse.Namespace) -> "JudgedVersion":
    pin, folder = environment.pin, environment.folder.parent
    say(f"judging with {pin}")
    asked = {"backend": options.backend, "capability": options.capability}
    asked |= {name: [value] for name in ("tier", "device", "cases") if (value := getattr(options, name))}
    selection = [f"--{name}={value}" for name, values in asked.items() for value in values]
    selection += ["--speed"] if options.speed else []
    status = environment.run("mla_conformance", "certify", *selection, "--out", str(folder)).returncode
    if status not in (0, 1, 3):  # with which it leaves a report
        raise InputError(f"certify with {pin} ended with status {status}")
    versions = {name: found.version for name, found in environment.find(names).items()}
    judged = JudgedVersion(pin, json_report.load_report(folder), versions)
    judged.require_loaded()
    return judged


@dataclass(frozen=True)
class JudgedVersion:
    pin: Pin
    run: summary.RunSummary
    versions: dict[str, str]  # of what was installed for either version, as it is found here; empty if it is not

    def require_loaded(self) -> None:
        for backend in self.run.backends:
            reported = {canonicalize_name(name): version for name, version in backend.facts.versions.items()}
            if not backend.reasons and not self.pin.admits(reported.get(self.pin.name, "")):
                got = ", ".join(f"{name} {version}" for name, version in reported.items()) or "no distribution"
                said = f"expected {backend.name} to stand on {self.pin}, got {got}"
                how = "a backend names what it stands on in Declaration.distributions"
                raise InputError(f"{self.run.source}: {said}; {how}")


@dataclass(frozen=True)
class Bump:
    before: JudgedVersion
    after: JudgedVersion

    @cached_property
    def pairs(self) -> list[tuple[summary.BackendSummary, summary.BackendSummary]]:
        return list(zip(self.before.run.backends, self.after.run.backends, strict=True))

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
    def kinds(self) -> list[list[Change]]:
        """What changed, kind by kind, regressions first; without a backend that the old version cannot run."""
        unknown = {old.name for old, _ in self.pairs if old.reasons}
        changes = (each for each in compare(self.before.run, self.after.run) if each.backend not in unknown)
        return [list(group) for _, group in groupby(changes, key=lambda change: change.kind)]

    @property
    def exit_status(self) -> int:
        """0: no regression; 1: something is worse; 3: of some backend nothing, or not everything, could be judged."""
        return 1 if any(changes[0].regression for changes in self.kinds) else 3 if self.unjudged else 0

    @property
    def sentence(self) -> str:
        passing = failing = 0  # with both versions, before any expectation
        for old, new in self.pairs:
            before, after = ({record.key: record.as_judged for record in each.records} for each in (old, new))
            both = [(before[key], after[key]) for key in before.keys() & after.keys()]
            passing += sum(was.status is now.status is Status.PASS for was, now in both)
            failing += sum(was.failed and now.failed for was, now in both)
        alike = f"pass with both: {counted(passing, 'case')}" + (f", fail with both: {failing}" if failing else "")
        if not self.exit_status:
            rest = f"none newly fails, is missing or uses over {DRIFT} more of its error budget"
            return f"no regression · {alike} · {rest}"
        kinds = [f"{len(changes)} {changes[0].kind}" for changes in self.kinds]
        verdict = "REGRESSED" if self.exit_status == 1 else "NOT JUDGED"
        return " · ".join([verdict, *kinds, alike, *(f"{name} could not be compared" for name in self.unjudged)])

    @property
    def tables(self) -> dict[str, list[tuple[str, ...]]]:
        """What was installed and differs, verdicts, and times, which decide nothing; each row ends before and after."""
        versions = differing(self.before.versions, self.after.versions)
        times = list[tuple[str, ...]]()
        for pair in self.pairs:
            timed = [each.speed or Speed() for each in pair]
            for shape in columns_of([(each.name, speed) for each, speed in zip(pair, timed, strict=True)]):
                taken = (str(found.best) if (found := speed.of(shape)) else "no time" for speed in timed)
                times.append((pair[0].name, shape, *taken))
        installed: list[tuple[str, ...]] = [(name, old or "none", new or "none") for name, old, new in versions]
        judged: list[tuple[str, ...]] = [(old.name, _counts(old), _counts(new)) for old, new in self.pairs]
        return {"installed": installed, "backend": judged, **({"backend,time": times} if times else {})}


def bump_lines(bump: Bump) -> Iterator[str]:
    """The verdict, last, and before it everything that it follows from."""
    rows = (row for rows in bump.tables.values() for row in rows)
    yield from (f"{' '.join(names)} {before} → {after}" for *names, before, after in rows)
    yield from change_lines(chain(*bump.kinds), all_regressions=False)
    yield from (f"? {name}: {why}" for name, why in bump.unjudged.items())
    yield bump.sentence


def bump_markdown(bump: Bump) -> str:
    old, new = bump.before.pin, bump.after.pin
    title = ci_views.inline(f"{old.name} {old.version} → {new.version}")
    lines = [f"## MLA conformance: {title}", "", ci_views.inline(bump.sentence), ""]
    for names, rows in bump.tables.items():
        lines += _table([*names.split(","), "before", "after"], rows)
    for changes in bump.kinds:
        lines += [f"### {'❌' if changes[0].regression else '➖'} {changes[0].kind} ({len(changes)})", ""]
        lines += _table(["backend", "case", "what"], [(c.backend, c.key, c.detail) for c in changes[:SHOWN]])
    lines += _table(["not judged", "why"], bump.unjudged.items()) if bump.unjudged else []
    facts = " · ".join(f"{name} {value}" for name, value in bump.after.run.environment.items() if value)
    return "\n".join([*lines, f"<sub>{ci_views.inline(facts)}</sub>", ""])


def _counts(backend: summary.BackendSummary) -> str:
    if backend.reasons:
        return "unavailable"
    counts = backend.counts
    more = counts.noted(failed="failed", waived="expected to fail", not_run="NOT RUN", unsupported="unsupported")
    return ", ".join([f"{counts.passed}/{counts.judged} passed", *more])


def _table(head: Sequence[str], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [head, ["---"] * len(head), *([ci_views.inline(cell) for cell in row] for row in rows)]
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]
