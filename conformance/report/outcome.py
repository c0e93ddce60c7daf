"""The outcome of a run in words: causes, backend by backend, what is right for a deployed model, the closing line."""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import chain
from pathlib import Path

from mla_conformance.backends.foreign import cut
from mla_conformance.backends.roles import ROLES, Role
from mla_conformance.cases.case import Call, Case
from mla_conformance.judging.record import FAILED, BackendFacts, Record, Status, Traced, detection
from mla_conformance.judging.traits import ASKED, Answer, Question
from mla_conformance.report import causes, summary
from mla_conformance.report.summary import SIGN, BackendOutcome, BackendSummary, Counts, Group, RunSummary
from mla_conformance.report.terminal import columns, counted, fitting, near, shown, side_by_side, wrapped
from mla_conformance.speed.times import remarks_of, table_of
from mla_conformance.vocabulary.capabilities import DUE_ON_GPU

_INDENT = " " * 7
_ID = 100  # characters of a case id within a sentence
_MOST_CAUSES = 7
_MOST_AFTER = 3  # cases before another one that a line to copy names
_MOST_REASONS = 5
_SHORT = {Group.EMULATED: "right, but emulated", Group.WAIVED: "wrong, as expected", Group.UNTESTED: "cannot run here"}
_OTHER_ROLES = tuple(f"{role} only" for role in ROLES)  # how what is said of a case of another role ends


def closing_line(run: RunSummary) -> str:
    """Every backend and every case is counted once."""
    found = Counter(backend.group for backend in run.backends)
    groups = [(found[group], _SHORT.get(group, group)) for group in Group if found[group]]
    backends = [f"{counted(number, 'backend')} {what}" for number, what in groups[:1]]
    backends += [f"{number} {what}" for number, what in groups[1:]]
    cases, said = of_cases(run.counts), worst_error(run.backends)
    if said and len(run.backends) > 1:
        said += f", {max(run.backends, key=lambda backend: backend.worst).name}"
    return " · ".join(filter(None, [*backends, f"cases: {cases[0]}", *cases[1:], said]))


def of_cases(counts: Counts) -> list[str]:
    """What became of cases, in figures that add up to all of them."""
    reported = [f"{counts.passed} passed", f"{counts.failed} failed", f"{counts.unsupported} unsupported"]
    return [*reported, *counts.noted(waived="expected to fail", unavailable="unavailable", not_run="NOT RUN")]


def worst_error(backends: Sequence[BackendSummary]) -> str:
    """How much of its budget the largest error of a passed case used; empty without a pass."""
    passed = any(backend.counts.passed for backend in backends)
    return f"worst passing error {max(backend.worst for backend in backends):.2f} of its budget" if passed else ""


def cause_lines(run: RunSummary, width: int) -> Iterator[str]:
    """What is wrong with each backend; replay lines stay whole, to be copied. Causes count through all backends."""
    numbered, before = len(run.causes) > 1, 0
    for backend in run.backends:
        reported, hidden = backend.causes[:_MOST_CAUSES], backend.causes[_MOST_CAUSES:]
        # How many causes are likely, and of how many cases none is.
        likely = [cause for cause in backend.causes if cause.kind == "likely"]
        cases, explained = (sum(len(cause.failures) for cause in each) for each in (backend.causes, likely))
        further = cases - explained if likely else 0
        extent = counted(further, "more case") if further else counted(cases, "case")
        what = "wrong" if backend.group is Group.WRONG else "not judged"
        head = f"{what}: {backend.name}, " + (f"{counted(len(likely), 'likely cause')}, " if likely else "") + extent
        if numbered and reported:
            yield head
        for number, cause in enumerate(reported, start=before + 1):
            if numbered:
                head = f"    {number}. {cause.cases}{cause.reserve}"
            example = from_here(cause.example)
            said = example.message.removesuffix(f" (SPEC {example.clause})")
            simplest = "" if len(cause.failures) == 1 else "simplest case: "
            seen = "" if said.endswith(cause.sentence) else f"{simplest}{said}"
            yield from wrapped(f"{head}: {cut(cause.sentence)}{cut(cause.extent)}", width, further=_INDENT)
            raised, advice = causes.raised_at(cause.example), causes.advice(example)
            for detail in (cause.only, seen, raised, example.confirmed, advice):
                yield from wrapped(cut(detail), width, _INDENT, _INDENT)
            command = example.replay
            if run.source and len(example.after) > _MOST_AFTER:
                command = f"mla-conformance replay --report {shlex.quote(run.source)} --failure {number}"
            yield f"{_INDENT}replay: {command}"
        if hidden:
            yield f"    … and {counted(sum(len(each.failures) for each in hidden), 'more case')} in the report"
        before += len(backend.causes)


def from_here(record: Record) -> Record:
    """A record whose backend and role are named as one would name them in the current folder."""
    location, _, name = record.reference.rpartition(":")
    record = record.with_fields(role=str(near(Path(record.role)))) if record.role else record
    return record.with_fields(reference=f"{near(Path(location))}:{name}") if location.endswith(".py") else record


def _part_of(case: str) -> str:
    """The part of an engine that a case is of: its role, or the sparse call."""
    parsed = Case.parse(case)
    is_sparse = parsed.call in (Call.SPARSE_DECODE, Call.SPARSE_PREFILL)
    return parsed.call.replace("_", " ") if is_sparse else str(parsed.role)


def answer(backend: BackendSummary) -> str:
    """What of a deployed model was judged, part by part, and what was not and why."""
    if backend.reasons:
        return "; ".join(backend.reasons)
    judged, refused = [], {}
    parts = causes.grouped(backend.records, lambda record: _part_of(record.case))
    for part, records in parts.items():
        counts = Counts.of(records)
        # Why cases have no verdict, in the words of most of them.
        without = [record for record in records if record.status in (Status.UNSUPPORTED, Status.UNAVAILABLE)]
        reason = Counter(record.message for record in without).most_common(1)[0][0] if without else ""
        if counts.verdicts:
            why = f" ({counts.unsupported + counts.unavailable} not: {reason})" if without else ""
            judged.append(f"{part} {counts.passed}/{counts.verdicts}{why}")
        else:
            refused[part] = reason
    # Of parts of which nothing was judged those that it has a class for, or all parts if it has none.
    own = {part: reason for part, reason in refused.items() if not reason.endswith(_OTHER_ROLES)}
    told = [f"no {part}: {reason}" for part, reason in own.items()]
    if len(refused) == len(parts) and not own:
        told = [f"{reason}, which this model does not call" for reason in dict.fromkeys(refused.values())]
    waived = dict.fromkeys(record.expectation for record in backend.records if record.expectation)
    return " · ".join([*judged, *told, *waived, *filter(None, [backend.not_run])])


def answers(run: RunSummary) -> list[tuple[BackendSummary, str]]:
    by_group = sorted(run.backends, key=lambda backend: list(Group).index(backend.group))
    return [(backend, answer(backend)) for backend in by_group]


class Detail(IntEnum):
    """How much is said of what is not wrong."""

    QUIET = -1  # a line for each backend
    USUAL = 0
    FULL = 1  # also what passed, capability by capability, and what a backend declares


def outcome_lines(run: RunSummary, width: int, brief: bool = False, detail: Detail = Detail.FULL) -> Iterator[str]:
    """What is wrong, then all backends, or their groups for a model; brief, what cannot run here is one line."""
    absent = [backend for backend in run.backends if backend.reasons] if brief else []
    reported = replace(run, backends=tuple(backend for backend in run.backends if backend not in absent))
    found = answers(reported) if run.deployment else []
    timed = [backend for backend in reported.backends if backend.speed and backend.speed.has_times]
    if kernels := [(backend.name, backend.speed) for backend in reported.backends if backend.speed]:
        rows = table_of(kernels)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for number, (name, *cells) in enumerate(rows):
            padded = (cell.rjust(size) for cell, size in zip(cells, widths[1:], strict=True))
            yield "  ".join([(f"  {name}" if number else name).ljust(widths[0] + 2), *padded])
        remarks = remarks_of(kernels) if detail is not Detail.QUIET else ()
        yield from chain.from_iterable(wrapped(cut(remark), width, "  ", 2 * "  ") for remark in remarks)

    def told(group: Group, head: str) -> Iterator[str]:
        listed = timed if group is Group.RIGHT and detail is not Detail.FULL else []  # in the table
        of_group = [(backend, said) for backend, said in found if backend.group is group and backend not in listed]
        yield from [head] if of_group else []
        for backend, said in of_group:
            yield from wrapped(f"{backend.name}  {said}", width, "  ", _INDENT)

    if run.deployment:
        right = [backend for backend in reported.backends if backend.group is Group.RIGHT]
        if not right:
            yield f"right for {run.deployment}: none of the backends that can run here"
        where = ", on this CPU" if run.environment.get("device") == "cpu" else ""
        for group in (Group.RIGHT, Group.EMULATED):
            yield from told(group, f"{group} for {run.deployment}{where}:")
        passed = {_part_of(record.case) for each in right for record in each.records if record.status is Status.PASS}
        if missing := [part for part in dict.fromkeys(map(_part_of, reported.cases)) if part not in passed]:
            yield f"nothing right for: {', '.join(missing)}"
    yield from cause_lines(reported, width) if reported.counts.failed else ()
    others = (Group.WRONG, Group.WAIVED, Group.INCOMPLETE, Group.REFUSED, Group.UNTESTED)
    for group in others if run.deployment else ():
        yield from told(group, f"{group}, part by part:" if group is Group.WRONG else f"{group}:")
    for backend in () if run.deployment else reported.backends:
        yield from backend_lines(backend, width, with_reasons=len(run.backends) == 1, detail=detail)
    if absent and detail is not Detail.QUIET:
        sign = SIGN[BackendOutcome.UNAVAILABLE]
        head = f"{sign} {len(absent)} cannot run here, 'mla-conformance backends' says why: "
        yield fitting(head, [backend.name for backend in absent], width)


_TOUCHED, _SHOWN_KERNELS = 0.01, 2
_KERNEL = re.compile(r"(?:void )?((?:\(anonymous namespace\)|[^<(])+)")  # without template arguments and parameters
_DETAIL = "  "
_UNROUNDED = {Role.TOPK, Role.PREPARE, Role.COMPRESS, Role.CACHE}  # roles in which no declared rounding class counts
_JUDGED = (Status.PASS, Status.EXPECTED_FAILURE, *FAILED)
_SIGNS = "✘!?✔"  # of capabilities, in the order in which they are told
ANSWER_SIGN = {Answer.YES: "✔", Answer.NO: "✘", Answer.NOT_APPLICABLE: "–"}


def backend_lines(
    backend: BackendSummary, width: int, with_reasons: bool = False, detail: Detail = Detail.FULL
) -> Iterator[str]:
    """With reasons it is said why cases are unsupported or unavailable, if not in full of roles alone that it has."""
    sign = f"{backend.name} {backend.sign}"
    if backend.reasons:
        yield from wrapped(f"{sign} unavailable: {cut('; '.join(backend.reasons))}", width, further=2 * _DETAIL)
        return
    applicable = [each for each in backend.capabilities if each.outcome is not BackendOutcome.UNSUPPORTED]
    yield from wrapped(f"{sign} {_verdict(backend, len(applicable))}", width, further=2 * _DETAIL)
    if detail is Detail.QUIET:
        return
    is_full = detail is Detail.FULL
    begun = [each for each in applicable if each.counts.not_run < each.counts.listed]
    for sign in _SIGNS if is_full else _SIGNS[:-1]:
        texts = []
        for each in (each for each in begun if each.sign == sign):
            # ``name 12``, or ``name 12 of 15`` where three do not count; ``name 11/12``, of judged, if one failed
            counts = each.counts
            rest = f" of {counts.listed}" if counts.passed < counts.listed else ""
            rest = rest if each.outcome is BackendOutcome.PASS else f"/{counts.judged}"
            notes = counts.noted(unavailable="unavailable", waived="expected to fail")
            texts.append(f"{each.name} {counts.passed}{rest}" + "".join(f" ({note})" for note in notes))
        yield from side_by_side([f"{sign} {texts[0]}", *texts[1:]], ", ", width, _DETAIL) if texts else ()
    untouched = [each.name for each in applicable if each not in begun]
    refused = [each.name for each in backend.capabilities if each not in applicable] if is_full else []
    for names, what in ((untouched, "? {} not begun: "), (refused, "– {} unsupported: ")):
        yield from [fitting(f"{_DETAIL}{what.format(len(names))}", names, width)] if names else []
    for remark in _remarks(backend, with_reasons, is_full):
        yield from wrapped(remark, width, _DETAIL, 2 * _DETAIL)


def _remarks(backend: BackendSummary, with_reasons: bool, is_full: bool) -> Iterator[str]:
    judged = {Case.parse(record.case).role for record in backend.records if record.status in _JUDGED}
    own = (record for record in backend.records if is_full or not judged or Case.parse(record.case).role in judged)
    without = (record for record in own if with_reasons and record.status in (Status.UNSUPPORTED, Status.UNAVAILABLE))
    reasons = Counter((record.status, record.message) for record in without)
    for (status, reason), count in reasons.most_common(_MOST_REASONS):
        yield f"{counted(count, 'case')} {status}: {cut(reason) or 'no reason given'}"
    if len(reasons) > _MOST_REASONS:
        yield f"… and {counted(len(reasons) - _MOST_REASONS, 'more reason')} in the report"
    if backend.stopped and backend.not_run:
        yield cut(backend.not_run)
    if backend.pairs and (is_full or summary.total(backend.pairs).not_judged):
        yield judged_of_claimed(backend.pairs, backend.records)
    if backend.facts.rounding and is_full and not (judged and judged <= _UNROUNDED):
        yield declared(backend.facts)
    if chosen := [record.sampled for record in backend.records if record.sampled]:  # of which not every row was judged
        least = min(chosen, key=lambda rows: rows["rows"] / rows["of"])
        seen = min(detection(rows["drawn"], _TOUCHED) for rows in chosen)
        judged_rows = f"at least {least['rows']} of {least['of']} with every head"
        defect = f"a defect in {_TOUCHED:.0%} of the rows is among them with probability {seen:.3f}"
        yield f"{counted(len(chosen), 'case')} judged by chosen rows, {judged_rows}; {defect}"
    if undecided := [record for record in backend.records if record.inconclusive]:
        rows, most = sum(each.inconclusive for each in undecided), max(undecided, key=lambda each: each.inconclusive)
        said = f"{rows:,} rows of {counted(len(undecided), 'case')} inconclusive, neither right nor wrong"
        such = f"{most.inconclusive:,} of {shown(cut(most.case, _ID))}"
        yield f"{said}: their budget is so wide that zeros would pass, as {such}"
    yield from ran(backend.traced)
    for question in Question if backend.traits.bitwise else ():
        answers = backend.traits.answers(question)
        reported = ", ".join(f"{role} {ANSWER_SIGN[each.answer]}" for role, each in answers.items())
        yield f"same bits {ASKED[question]}: {reported}"
        yield from (f"  {role}: {each.why}" for role, each in answers.items() if each.answer is Answer.NO)
    for (role, dtype), spreads in causes.grouped(backend.traits.accuracy, lambda each: (each.role, each.dtype)).items():
        largest = max(spreads, key=lambda each: each.budget[-1])  # of the regimes, the one with the largest error
        median, tail, worst = largest.budget
        said = f"{worst:.2g} of the budget at worst, 99 % within {tail:.2g}, median {median:.2g} ({largest.data})"
        yield f"errors of {role} {dtype}: {said}"
    if backend.facts.emulated:
        yield "an emulated kernel: judged, never certified"


def _verdict(backend: BackendSummary, applicable: int) -> str:
    if not applicable:
        return "unsupported"
    if said := refusing(backend):
        return said
    counts, held = backend.counts, sum(each.sign == SIGN[BackendOutcome.PASS] for each in backend.capabilities)
    capabilities = f"{held}/{applicable} capabilities"
    if backend.outcome is not BackendOutcome.PASS:
        return f"passed {counts.passed}/{counts.judged} cases, {capabilities}"
    if counts.waived:
        return f"wrong, as expected, on {counts.waived:,} of {counts.verdicts:,} cases; {capabilities}"
    return f"right: {summary.right_on(backend.records)}"


def refusing(backend: BackendSummary) -> str:
    """What is said of a backend that computed nothing, and refused what it had to; empty of any other."""
    if not backend.only_refuses or backend.outcome not in (BackendOutcome.PASS, BackendOutcome.UNSUPPORTED):
        return ""
    refused = f"refuses {counted(backend.counts.passed, 'case')} as it must"
    if backend.outcome is BackendOutcome.PASS:
        return f"{refused}, nothing else was asked"
    return f"not judged: {refused}, and none of {counted(backend.counts.unsupported, 'other case')} is supported"


def judged_of_claimed(pairs: Mapping[str, summary.JudgedPairs], records: Iterable[Record] = ()) -> str:
    """Over all roles, with a pair that was not judged, and how many of its ``records`` a CPU was not asked for."""
    whole = summary.total(pairs)
    due = sum(record.status is Status.UNSUPPORTED and record.message.startswith(DUE_ON_GPU) for record in records)
    missing = f"; not judged, for example: {whole.not_judged[0]}" if whole.not_judged else ""
    return f"{whole}" + (f"; {counted(due, 'case')} {DUE_ON_GPU}, not judged here" if due else "") + missing


def declared(facts: BackendFacts) -> str:
    """The rounding classes that a backend declares, all verified by the cases."""
    found: dict[str, dict[str, list[str]]] = {}
    roles = set[str]()
    for key, value in facts.rounding.items():
        role, _, name = key.partition(": ")
        role, name = (role, name) if role in ROLES else (str(Role.PREFILL), key)
        found.setdefault(name.replace("_", " "), {}).setdefault(value, []).append(role)
        roles.add(role)
    classes = []  # each once, with the roles that have it where they do not all have the same
    for name, values in found.items():
        said = [value if set(having) == roles else f"{value} ({', '.join(having)})" for value, having in values.items()]
        classes.append(f"{name} {', '.join(said)}")
    return f"declares {', '.join(classes)}; {counted(len(facts.deviations), 'deviation')}, listed in the report"


def ran(traced: Traced) -> Iterator[str]:
    """The kernels that were seen to run, the first few by name; that all of them are torch's, if so."""
    names = list(dict.fromkeys(found[1] if (found := _KERNEL.match(name)) else name for name in traced.distinct))
    if names:
        more = f" and {len(names) - _SHOWN_KERNELS} more" if len(names) > _SHOWN_KERNELS else ""
        yield f"kernels seen: {', '.join(names[:_SHOWN_KERNELS])}{more}"
    elif traced.kernels:
        yield "only generic kernels of torch were seen to run, none of a library"


def capability_lines(records: Sequence[Record], in_full: bool = True) -> Iterator[str]:
    for name, group in causes.grouped(records, lambda record: record.backend).items():
        found = BackendSummary(BackendFacts(name), summary.summarise(group))
        yield from backend_lines(found, columns(), detail=Detail.FULL if in_full else Detail.USUAL)
