"""A run: places for its workers, what its backends are, every verdict, and the confirmation of what failed."""

import datetime
import os
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from mla_conformance.backends import foreign, references, roles
from mla_conformance.cases.case import Case
from mla_conformance.diagnosis.heat_map import is_mapped
from mla_conformance.driving.loaded import deciding_files
from mla_conformance.engine import journal
from mla_conformance.engine.confirm import MOST_EXPLAINED, Attempts, compared, comparisons, confirmation
from mla_conformance.engine.journal import LOG_NAME, Findings, RunFolder
from mla_conformance.engine.machine import ALONE, DUMPABLE, FORBIDS_PIPES, LANDLOCK, WHOLE, GpuPart, prctl
from mla_conformance.engine.messages import Describe, Examine, Explore, Fit, Found, Judge, Step, TakeTimes, Told, Trace
from mla_conformance.engine.request import Plan, RunRequest
from mla_conformance.engine.supervisor import CPU_TIMEOUT, GPU_TIMEOUT, Limits, Pool, RunError, Supervisor
from mla_conformance.engine.tasks import ENOUGH, TaskOutcome, Tasks, alike, call_of, judged_on_gpu, rounds_of
from mla_conformance.expectations import Expectations
from mla_conformance.files.places import load_all_again, refuse_written_since
from mla_conformance.files.whole import InputError
from mla_conformance.judging import explored, traits
from mla_conformance.judging.record import (
    COMPILING,
    EXPLORED,
    NOTHING_TRACED,
    UNASKED,
    BackendFacts,
    Check,
    Record,
    RecordKey,
    Status,
    Verdict,
    failed,
)
from mla_conformance.report.causes import UNWANTED, grouped, symptom
from mla_conformance.report.summary import BackendSummary, Group, RunSummary, judged_pairs, summarise
from mla_conformance.report.terminal import counted, near
from mla_conformance.speed.times import KINDS, Speed, forms_of
from mla_conformance.version import SUITE_VERSION, __version__
from mla_conformance.vocabulary.arrays import SPACES, digest_of
from mla_conformance.vocabulary.capabilities import FITTED, Tier

# Distributions that compile kernels on a GPU when they are called, which may take longer than all else.
_COMPILERS = frozenset(("apache-tvm-ffi", "flashinfer-python", "nvidia-cutlass-dsl", "sgl-deep-gemm", "triton"))
# What the environment says of a run whose journal a kernel could have written, seal and all.
UNSEALED = "not sealed from the kernel: this system has no Landlock of Linux 5.19 or later"


@contextmanager
def passing_run(request: RunRequest, limits: Limits | None = None, **settings: Any) -> Iterator["Run"]:
    """A run of one worker, if no limits say otherwise, whose folder goes when it is over."""
    with TemporaryDirectory(prefix="mla-conformance-run-") as folder:
        yield Run(request, RunFolder.claim(Path(folder)), limits or Limits(workers=1), **settings)


@dataclass
class Run:
    request: RunRequest
    folder: RunFolder
    limits: Limits = field(default_factory=Limits)
    expectations: Expectations = field(default_factory=Expectations)
    environment: dict[str, str] = field(default_factory=dict)  # where and with what it takes place, once it is prepared
    facts: list[BackendFacts] = field(default_factory=list)  # of its backends, once it is prepared
    explains: bool = True  # whether failures are compared with known mistakes
    before: Sequence[str] = ()  # cases that each process runs before each of its own
    found: Findings = field(default_factory=Findings)  # what it found so far
    on_record: Callable[[Record], None] = lambda record: None  # is given each record once it is journalled
    on_phase: Callable[[str], None] = lambda what: None  # is told what goes on where that is not all at once
    _first: Sequence[str] = ()  # cases that come before the others
    _tried: set[RecordKey] = field(default_factory=set)
    _explained: set[RecordKey] = field(default_factory=set)
    _early: list[journal.JournalEvent] | None = field(default_factory=list)  # while there is no journal
    _explored: explored.Explorations = field(default_factory=explored.Explorations)
    _missing: dict[str, dict[str, str]] = field(default_factory=dict)
    _positions: dict[str, int] = field(default_factory=dict)  # of cases in the list; drawn ones stand behind them

    def __enter__(self) -> "Run":
        prctl(DUMPABLE, 0)
        refuse_written_since(time.time())
        timeout = self.limits.timeout or (CPU_TIMEOUT if self.request.surely_cpu else GPU_TIMEOUT)
        self.supervisor = Supervisor(timeout, self.limits.ends_at)
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.close()
        load_all_again()
        os.close(self.folder.lock)
        prctl(DUMPABLE, 1)

    def prepare(self) -> None:
        """Start the workers, and have them tell what the backends are; an InputError if the device is not there."""
        self._deciding = deciding_files()
        self._pool = Pool(self.request, self.limits, self.supervisor, time.time())
        hello = self._pool.hello
        self.device = hello.device
        if self.device == "cuda" and set(self.request.backends) == set(references.usual_backends()):
            # What EAGER shows of the judge it shows on a CPU; here smoke would wait for two minutes of a worker.
            self.request = replace(self.request, backends=tuple(references.usual_backends(on_gpu=True)))
        told = {"suite": SUITE_VERSION, "version": __version__, "tier": self.request.tier.value}
        told |= {"salt": self.request.salt, "judge": "kernel and judge apart", "role": roles.outside()}
        told |= {"journal": "" if LANDLOCK >= FORBIDS_PIPES else UNSEALED}
        self.environment = {**{name: value for name, value in told.items() if value}, **hello.facts}
        self.describe()
        self.plan = Plan.of(self.request, self.device, self.environment, self.facts)

    def outcomes(self, tasks: Tasks, part: GpuPart | None = None) -> Iterator[TaskOutcome]:
        """Have tasks carried out, without a part of a GPU as cases that share one; what their processes load is kept.

        A case has failed whose backend declared something else where it was judged than where it was asked.
        """
        if part is None and self.device == "cuda":
            yield from judged_on_gpu(self.outcomes, self._pool.beside, self.on_phase, tasks)
            return
        for outcome in self.supervisor.run(tasks, part or WHOLE):
            loaded = outcome.answer.loaded
            if loaded.found or loaded.generated:
                self._write(journal.CodeLoaded(loaded))
            record = outcome.answer.record
            known = next((each.declared for each in self.facts if each.reference == outcome.task.reference), {})
            for role, now in outcome.answer.declared.items():
                if record and (other := set(now.split(", ")) - set(known.get(role, now).split(", "))):
                    what = f"declared {', '.join(sorted(other))} where it was judged, not where it was described"
                    record = record.with_verdict(failed(Check.CALL, what), record.seconds)
            yield replace(outcome, answer=msgspec.structs.replace(outcome.answer, record=record))

    def describe(self) -> None:
        names = {backend.reference: backend.name for backend in self.request.backends}
        found: dict[str, BackendFacts] = {}
        for outcome in self.outcomes(Tasks([[Describe(each, self._pool.examples)] for each in names]), WHOLE):
            reference = outcome.task.reference
            why = f"its process ended while it was imported and described: {outcome.ended}"
            ended = BackendFacts(names[reference], reference, (why,), fingerprint="unavailable")
            found[reference] = outcome.answer.facts or ended
            self._missing[reference] = outcome.answer.missing
        self.facts = [found[reference] for reference in names]
        if not self.request.arrays:
            return
        # Cases are fitted to each backend that can run, one task a role, those with most dimensions first.
        spaces = sorted(map(SPACES.__getitem__, self.request.arrays), key=lambda space: -len(space.dimensions))
        asked = [(facts, space) for space in spaces for facts in self.available if space.role in facts.declared]
        tasks = Tasks([[Fit(facts.reference, space.capability, FITTED[self.request.tier])] for facts, space in asked])
        fitted: dict[tuple[str, str], tuple[str, ...]] = {}
        gone: dict[str, tuple[str, ...]] = {}
        again = set[Fit]()
        for outcome in self.outcomes(tasks, WHOLE):
            task = outcome.task
            assert isinstance(task, Fit)
            fitted[task.reference, task.capability] = outcome.answer.fitted
            if outcome.answer.facts:
                gone[task.reference] = outcome.answer.facts.reasons
            elif outcome.ended and task in again:
                gone[task.reference] = (f"its process ended while cases were fitted to it: {outcome.ended}",)
            elif outcome.ended:  # perhaps another backend had damaged the process
                again.add(task)
                tasks.groups.append([task])
        for number, facts in enumerate(self.facts):
            if facts.reference in gone:
                self.facts[number] = replace(facts, reasons=gone[facts.reference], fingerprint="unavailable")
            elif not facts.reasons:
                own = (fitted.get((facts.reference, name), ()) for name in self.request.arrays)
                cases = tuple(chain.from_iterable(own))
                self.facts[number] = replace(facts, fitted=cases, region=digest_of(cases))

    @property
    def available(self) -> list[BackendFacts]:
        return [facts for facts in self.facts if not facts.reasons]

    def begin(self, resumed: Plan | None = None) -> list[int]:
        """Write what the run is, or go on with one of the same code; the numbers of lines that no run wrote."""
        cases = dict.fromkeys(case for facts in self.facts for case in self.request.judged_of(facts))
        self._positions = {case: index for index, case in enumerate(cases)}
        left_out = list[int]()
        if not resumed:
            self.folder.begin()
        else:
            if different := resumed.differences(self.plan):
                raise InputError(f"--resume {self.folder.path}: it holds another run; {'; '.join(different)}")
            earlier = Findings()
            for event in self.folder.journal.sealed().values():
                for found in (earlier, self.found):
                    found.keep(event)
            if changed := earlier.code.changed():
                said = f"code that the run had loaded has changed: {counted(len(changed), 'file')}, first {changed[0]}"
                why = "Verdicts on different code do not add up, and what a kernel compiles differs between machines"
                what = "start again on one machine, without --resume"
                raise InputError(f"--resume {self.folder.path}: {said}. {why}: {what}")
            left_out = self.folder.journal.take_up()
            # Judged again is what this machine has enough memory for: it was lacking, or time to compile.
            self.found.verdicts = {key: each for key, each in self.found.verdicts.items() if not each.is_unjudged}
        self.supervisor.told = self._hear
        self.supervisor.log.write_to(self.folder.path / LOG_NAME)
        early, self._early = self._early or [], None
        for event in (journal.Resumed() if resumed else journal.Planned(msgspec.to_builtins(self.plan)), *early):
            self._write(event)
        return left_out

    def begin_anew(self) -> None:
        """Go on as if nothing was judged, and no backend was known; what failed comes first."""
        failed = [record.case for record in self.found.verdicts.values() if record.failed]
        left = set(self._first) - {record.case for record in self.found.verdicts.values()}
        self._first, self.found, self._tried, self._explained = (*failed, *sorted(left)), Findings(), set(), set()
        self._explored = explored.Explorations()
        for place in self.supervisor.places:
            place.renew()
        self.describe()

    def judge(self) -> None:
        """Judge what has no verdict yet, then confirm what failed.

        It is Stopped by a signal or the deadline; a RunError if no process starts, or the journal cannot be written.
        """
        on_phase = self.on_phase
        try:
            failures = self.first_verdicts()
            if any(record.failed for record in self.found.verdicts.values()):
                self.settle_failures(failures)
            without = [facts.reference for facts in self.available if not self.found.of(facts.reference).traits]
            if without and (self.request.bitwise or self.request.accuracy):
                on_phase("asking when bits are the same, and how errors are spread")
                asked = [[Examine(each, self.request.bitwise, self.request.accuracy)] for each in without]
                for outcome in self.outcomes(Tasks(asked), WHOLE):
                    self._learn(outcome.task.reference, Found(traits=outcome.answer.found.traits or traits.NO_TRAITS))
            # Starting a profiler takes seconds; for a deployment's few cases, longer than judging them.
            if self.device == "cuda" and not (self.request.cases or self.request.tier is Tier.SMOKE):
                on_phase("looking which kernels run")
                self._trace()
            if self.request.speed:
                self._take_times()
            self._write(journal.Completed())
        except journal.UnwrittenError as error:
            said = f"what was judged before stands in it: make room, then {self.resume_line}"
            raise RunError(f"cannot write the journal of {self.folder.path}: {error.strerror}; {said}") from error

    def finish(self) -> None:
        """End every process; a RunError if what decides is not what it was at the begin, so that nothing counts."""
        self.supervisor.end()
        changed = {path for path, _ in self._deciding.items() ^ deciding_files(self._deciding).items()}
        for whose, files, what in (
            ("this installation", changed, "restore the installation and "),
            ("the backends", self.found.code.conflicts, ""),
        ):
            if files:
                said = f"{counted(len(files), 'file')} of {whose} changed while the run judged, such as {min(files)}"
                raise RunError(f"{said}; there is no report: {what}start the run anew")

    def settle_failures(self, outcomes: Mapping[RecordKey, TaskOutcome]) -> None:
        while pending := self._unconfirmed(outcomes):
            explained = sum(explain for explain, _ in pending)
            told = f", explaining {explained} (--no-explain leaves that out)" if explained else ""
            self.on_phase(f"judging {counted(len(pending), 'failure')} again{told}")
            attempts = [(next(each), each) for _, each in pending]
            while attempts:
                of_task = {id(attempt): confirming for attempt, confirming in attempts}
                asked, attempts = Tasks([[attempt] for attempt, _ in attempts]), []
                for outcome in self.outcomes(asked):
                    assert outcome.answer.record is not None and isinstance(outcome.task, Judge)
                    self._learn(outcome.task.reference, outcome.answer.found, outcome.task.case)
                    confirming = of_task[id(outcome.task)]
                    try:
                        attempts.append((confirming.send(outcome.answer.record), confirming))
                    except StopIteration as settled:
                        self._write(journal.Judgement(settled.value))
        failures = [record for record in self.found.verdicts.values() if record.failed]
        groups = grouped(failures, lambda record: record.backend).values()
        if tasks := [[task] for group in groups for task in comparisons(group)]:
            self.on_phase(f"comparing {counted(len(tasks), 'failure')} with those that are explained")
        for outcome in self.outcomes(Tasks(tasks)):
            task = outcome.task
            assert outcome.answer.record is not None and isinstance(task, Judge)
            key = task.reference, task.case
            if outcome.answer.record.check == self.found.verdicts[key].check:
                self._learn(task.reference, outcome.answer.found, task.case)
            if found := compared(self.found.verdicts[key], outcome.answer.record):
                self._write(journal.Judgement(found))

    def _hear(self, told: Told) -> None:
        record = told.record
        if told.step is Step.STARTED:
            self._write(journal.CaseStarted(record.case, record.reference))
        elif told.step is Step.EXPLORED:
            assert told.explored is not None
            self._explored.keep(record.reference, told.part, told.explored)
            if self._explored.pace.is_due():
                self.on_phase(f"exploring {record.backend}: {self._explored.record(record.reference).message}")

    def _trace(self) -> None:
        untold = [record for record in self.found.verdicts.values() if not self.found.of(record.reference).traced]
        passed = [record for record in untold if record.status is Status.PASS]
        untraced: dict[str, dict[str, str]] = {}
        for record in sorted(passed, key=lambda record: record.seconds):
            untraced.setdefault(record.reference, {}).setdefault(record.capability, record.case)
        seen = dict.fromkeys(untraced, NOTHING_TRACED)
        parts = max(1, len(self.supervisor.places) // max(1, len(untraced)))  # of a backend, for workers of their own
        shares = [(name, list(cases.items())[n::parts]) for name, cases in untraced.items() for n in range(parts)]
        for outcome in self.outcomes(Tasks([[Trace(name, dict(share))] for name, share in shares if share]), WHOLE):
            name = outcome.task.reference
            seen[name] = seen[name].joined(outcome.answer.found.traced or NOTHING_TRACED)
        for name, traced in seen.items():
            self._learn(name, Found(msgspec.structs.replace(traced, kernels=dict(sorted(traced.kernels.items())))))

    def _take_times(self) -> None:
        asked, heads = dict[str, tuple[str, ...]](), self.request.deployment.heads if self.request.deployment else 0
        for backend in self.summary().backends:
            reference, passed = backend.facts.reference, [r.case for r in backend.records if r.status is Status.PASS]
            timed = (Group.RIGHT,) if self.request.is_usual else (Group.RIGHT, Group.EMULATED)
            if self.found.of(reference).speed or backend.group not in timed:
                continue
            if forms := forms_of(passed, heads, self.device):
                asked[reference] = forms
            else:
                kinds = ", ".join(dict.fromkeys(KINDS.values()))
                self._learn(reference, Found(speed=Speed(why=f"only {kinds} are timed")))
        part = ALONE if self.device == "cuda" else WHOLE
        for number, (reference, forms) in enumerate(asked.items(), start=1):
            self.on_phase(f"timing what is right, {number} of {len(asked)}: {reference}")
            for outcome in self.supervisor.run(Tasks([[TakeTimes(reference, forms)]]), part):
                # Whose code has to be what was judged; what a timer or larger shapes load beside it was not.
                judged = {x: new for x, new in outcome.answer.loaded.found.items() if x in self.found.code.digests}
                self.found.code.add(msgspec.structs.replace(outcome.answer.loaded, found=judged))
                ended = Speed(why=foreign.cut(f"its process ended while it was timed: {outcome.ended}"))
                self._learn(reference, Found(speed=outcome.answer.found.speed or ended))

    def first_verdicts(self) -> dict[RecordKey, TaskOutcome]:
        for facts in self.available:  # of a role that a backend lacks no process need be asked
            missing, backend = self._missing[facts.reference], references.parse_reference(facts.reference)
            for case in map(Case.parse, self.request.judged_of(facts) if missing else ()):
                if case.role in missing and (facts.reference, case.id) not in self.found.verdicts:
                    begun, lacking = Record.begun(backend, case, self.request.salt), missing[case.role]
                    self._write(journal.Judgement(begun.with_verdict(Verdict(Status.UNSUPPORTED, lacking), 0.0)))
        tasks, deaths = self._left(), Counter[tuple[str, str, str]]()
        failures: dict[RecordKey, TaskOutcome] = {}
        shared: dict[RecordKey, str] = {}
        ended = defaultdict[str, list[TaskOutcome]](list)  # parts of an exploration, by backend
        for outcome in self.outcomes(tasks):
            record, task = outcome.answer.record, outcome.task
            assert isinstance(task, Judge | Explore)
            if isinstance(task, Explore):
                self._explored.keep(task.reference, task.part, outcome.answer.explored, died_of=record)
                ended[task.reference].append(outcome)
                if len(ended[task.reference]) < task.parts:
                    continue
                record = self._explored.record(task.reference)
                self.on_phase(f"explored {record.backend}: {record.message}")
                judged = task.reference, record.case
                outcome = next((each for each in ended[task.reference] if judged in each.history), outcome)
            assert record is not None
            key = task.reference, task.case
            others = dict.fromkeys(reference for reference, _ in outcome.history if reference != task.reference)
            if isinstance(task, Judge) and not task.fresh and others and record.status is Status.CRASH:
                # Backends share the kernel's process, so that the crash may be another one's: then the case alone
                # counts, in a process of its own, and if it passes there the crash is charged to nobody.
                shared[key] = f"{record.message}; {', '.join(others)} had used the process before"
                tasks.groups.append([msgspec.structs.replace(task, fresh=True)])
                continue
            if (crashed := shared.get(key)) and not record.failed:
                said = f"{crashed}, and in one of its own it is {record.status}: the crash is charged to nobody"
                record = record.with_fields(message=said, confirmation="unrepeated")
            self._write(journal.Judgement(record))
            if record.failed:
                failures[record.record_key] = outcome
            if record.status in (Status.CRASH, Status.TIMEOUT) or record.message == COMPILING:
                call, most = call_of(record.case), self.limits.give_up_after
                deaths[equal := (record.reference, call, record.message)] += 1
                if deaths[equal] >= most and equal[:2] not in tasks.dropped:
                    tasks.dropped.add(equal[:2])
                    what = f"gave up on {call} after {most} equal failures of its process: {record.message}"
                    self._write(journal.GaveUp(record.reference, what))
        return failures

    def _left(self) -> Tasks:
        ahead = [each for each in self.available if self.device != "cuda" or _COMPILERS.isdisjoint(each.versions)]
        known = self.before, self.found.verdicts, self._first, self._pool.workers
        several = [facts for facts in self.available if facts not in ahead]
        compiling = [piece for facts in several for piece in alike(self.request.tasks([facts], *known))]
        rounds = rounds_of(self.request.tasks(ahead, *known)) or [[]]
        if sum(map(len, compiling)) <= ENOUGH or not self.supervisor.gpus:
            if self.supervisor.gpus:
                self.supervisor.end(self._pool.workers)  # the others were to compile
            return Tasks([*chain.from_iterable(rounds), *compiling])  # of few no round waits for the one before
        tasks = Tasks(rounds[0], compiling, rounds[1:])
        tasks.ahead = self._pool.get_ahead()
        if tasks.groups:
            self.on_phase(f"judging {counted(len(ahead), 'backend')}, compiling for others beside them")
        return tasks

    def _unconfirmed(self, failures: Mapping[RecordKey, TaskOutcome]) -> list[tuple[bool, Attempts]]:
        """The next failure of each backend and capability without a confirmed one, and whether to explain it."""
        tried = [record for record in self.found.verdicts.values() if record.confirmation]
        done = {(record.reference, record.capability) for record in tried if record.failed}
        misled = {(record.reference, record.capability) for record in tried if not record.failed}
        # Of cases that were declared unsupported the kernel was not called.
        refused = {key for key, record in self.found.verdicts.items() if record.status is Status.UNSUPPORTED}
        found: list[tuple[bool, Attempts]] = []
        for record in sorted(self.found.verdicts.values(), key=lambda record: self._positions.get(record.case, inf)):
            key = (record.reference, record.capability)
            if not record.failed or key in done or record.record_key in self._tried:
                continue
            self._tried.add(record.record_key)
            verdicts = [self.found.verdicts[key] for key in self._explained if key[0] == record.reference]
            # What is likely to have one cause.
            kind, *kinds = [(Case.parse(x.case).role, x.finding or symptom(x)) for x in (record, *verdicts)]
            outcome = failures.get(record.record_key)
            before = takewhile((record.reference, record.case).__ne__, outcome.history if outcome else ())
            history = tuple(judged for judged in before if judged not in refused)
            is_first = record.is_wrong_number and kind not in kinds
            if explain := self.explains and is_first and len(set(kinds)) < MOST_EXPLAINED:
                self._explained.add(record.record_key)
            found.append((explain, confirmation(record, history, explain, len(self.request.cases) == 1)))
            done |= {key} - misled
        return found

    def _learn(self, backend: str, found: Found, case: str = "") -> None:
        if found != Found():
            self._write(journal.Learned(backend, found, case))

    def _write(self, event: journal.JournalEvent) -> None:
        """Journal an event and keep it: a backend may write into the file."""
        append = self.folder.journal.append if self._early is None else self._early.append
        append(event)
        self.found.keep(event)
        if isinstance(event, journal.Judgement):
            self.on_record(self._expected(event.record))

    def _expected(self, record: Record) -> Record:
        versions = next((facts.versions for facts in self.facts if facts.name == record.backend), {})
        return self.expectations.apply(record, {**versions, **self.environment})

    @property
    def resume_line(self) -> str:
        role = f" --role {shlex.quote(roles.outside().partition('@')[0])}" if roles.outside() else ""
        return f"mla-conformance certify --resume {shlex.quote(str(near(self.folder.path)))}{role}"

    def summary(self) -> RunSummary:
        groups: dict[str, list[Record]] = defaultdict(list)
        judged = {**{each.record_key: each for each in self._explored.cut_short()}, **self.found.verdicts}.values()
        for record in sorted(judged, key=lambda record: self._positions.get(record.case, inf)):
            # Of a failure that was to be explained an empty explanation stays empty, so that `verify` finds it.
            if record.is_wrong_number and not record.explanation and record.record_key not in self._explained:
                record = record.with_fields(explanation=UNASKED if self.explains else UNWANTED)
            groups[record.backend].append(self._expected(record))
        request, found, backends = self.request, self.found, list[BackendSummary]()
        for facts in self.facts:
            # One record stands for all drawn cases.
            cases = (*request.judged_of(facts), *([EXPLORED] if any(request.explore) else []))
            records = groups[facts.name]
            own = found.of(facts.reference)
            maps = {each.case: found.of(each.reference, each.case).heat for each in records if is_mapped(each)}
            summary = BackendSummary(
                facts,
                () if facts.reasons else summarise(records, cases),
                found.given_up.get(facts.reference, ""),
                own.traced or NOTHING_TRACED,
                {case: heat for case, heat in maps.items() if heat},
                judged_pairs(records, facts.fitted) if request.arrays else {},
                own.traits or traits.NO_TRAITS,
                own.speed,
            )
            backends.append(summary)
        run = self.environment, tuple(backends), request.case_ids, request.shard, request.deployment
        return RunSummary(*run, date=datetime.date.today().isoformat(), code=found.code.own)
