"""The outcome of a run as lines: backend by backend, or of a deployed model as the answer to what is right for it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mla_conformance.backends.roles import Role
from mla_conformance.judging.facts import BackendFacts, Traced
from mla_conformance.judging.record import Record, detection
from mla_conformance.report.answer import Group, ModelAnswer, answers, uncovered
from mla_conformance.report.shown import cut
from mla_conformance.report.summary import (
    BackendOutcome,
    BackendSummary,
    CapabilitySummary,
    RunSummary,
    by_backend,
    summarise,
)
from mla_conformance.report.terminal import SIGN, cause_lines, columns, counted, fitting, side_by_side, wrapped

_INDENT = "       "


def outcome_lines(run: RunSummary, width: int, brief: bool = False) -> Iterator[str]:
    """What is wrong, then all backends; or the groups that backends fall into for a model.

    Args:
        run: what was found.
        width: columns of the lines.
        brief: tell of those that cannot run here, of which nobody asked for any, in one line.
    """
    absent = [backend for backend in run.backends if backend.reasons] if brief else []
    reported = replace(run, backends=tuple(backend for backend in run.backends if backend not in absent))
    if run.deployment:
        yield from _answer_lines(reported, width)
    else:
        yield from cause_lines(reported, width)
        for backend in reported.backends:
            yield from backend_lines(backend, width)
    if absent:
        yield absent_line(absent, width)


def _answer_lines(run: RunSummary, width: int) -> Iterator[str]:
    found = answers(run)
    of_group = {group: [answer for answer in found if answer.group is group] for group in Group}
    if not of_group[Group.RIGHT]:
        yield f"right for {run.deployment}: none of the backends that can run here"
    for group in (Group.RIGHT, Group.EMULATED):
        yield from _group_lines(f"{group} for {run.deployment}:", of_group[group], width)
    if missing := uncovered(run, found):
        yield f"nothing right for: {', '.join(missing)}"
    yield from cause_lines(run, width)
    yield from _group_lines(f"{Group.WRONG}, part by part:", of_group[Group.WRONG], width)
    for group in (Group.WAIVED, Group.INCOMPLETE, Group.REFUSED, Group.UNTESTED):
        yield from _group_lines(f"{group}:", of_group[group], width)


def _group_lines(head: str, found: list[ModelAnswer], width: int) -> Iterator[str]:
    if found:
        yield head
    for answer in found:
        yield from wrapped(f"{answer.backend.name}  {answer.reported}", width, "  ", _INDENT)


_TOUCHED = 0.01
_SHOWN_KERNELS, _NAME_LENGTH = 2, 60
_DETAIL = "  "
_LISTED = (BackendOutcome.FAIL, BackendOutcome.NOT_RUN, BackendOutcome.UNAVAILABLE, BackendOutcome.PASS)


def backend_lines(backend: BackendSummary, width: int) -> Iterator[str]:
    """A backend's counts, its capabilities by outcome, and what else is to be said; or why it is unavailable.

    Args:
        backend: what was found.
        width: columns of the lines; one that tells what to install stays whole, for copying.
    """
    sign = f"{backend.name} {SIGN[backend.outcome]}"
    if backend.reasons:
        yield f"{sign} unavailable: {cut('; '.join(backend.reasons))}"
        return
    applicable = [each for each in backend.capabilities if each.outcome is not BackendOutcome.UNSUPPORTED]
    held = sum(each.outcome is BackendOutcome.PASS for each in applicable)
    passed = f"{backend.counts.passed}/{backend.counts.judged} cases, {held}/{len(applicable)} capabilities"
    yield f"{sign} passed {passed}" if applicable else f"{sign} unsupported"
    for outcome in _LISTED:
        texts = [capability_text(each) for each in applicable if each.outcome is outcome]
        yield from side_by_side([f"{SIGN[outcome]} {texts[0]}", *texts[1:]], ", ", width, _DETAIL) if texts else ()
    if refused := [each.name for each in backend.capabilities if each not in applicable]:
        yield fitting(f"{_DETAIL}{SIGN[BackendOutcome.UNSUPPORTED]} {len(refused)} unsupported: ", refused, width)
    for remark in _remarks(backend):
        yield from wrapped(remark, width, _DETAIL, 2 * _DETAIL)


def capability_text(capability: CapabilitySummary) -> str:
    """``name 12``, or ``name 12 of 15`` where three do not count; ``name 11/12``, passed of judged, if one failed."""
    counts = capability.counts
    text = f"{capability.name} {counts.passed}"
    if capability.outcome is not BackendOutcome.PASS:
        text += f"/{counts.judged}"
    elif counts.passed < counts.listed:
        text += f" of {counts.listed}"
    notes = counts.noted(unavailable="unavailable", waived="expected to fail")
    return text + "".join(f" ({note})" for note in notes)


def absent_line(backends: Sequence[BackendSummary], width: int) -> str:
    """Which backends cannot run here, by name, and where it is told why."""
    head = f"{SIGN[BackendOutcome.UNAVAILABLE]} {len(backends)} cannot run here, 'mla-conformance backends' says why: "
    return fitting(head, [backend.name for backend in backends], width)


def _remarks(backend: BackendSummary) -> Iterator[str]:
    if backend.stopped and backend.not_run:
        yield cut(backend.not_run)
    if backend.facts.rounding:
        yield declared(backend.facts)
    yield from sampled(backend)
    yield from ran(backend.traced)
    if backend.facts.emulated:
        yield "an emulated kernel: judged, never certified"


def declared(facts: BackendFacts) -> str:
    """The rounding classes that a backend declares, all verified by the cases, and how many deviations."""
    classes = ", ".join(_classes(facts.rounding))
    return f"declares {classes}; {counted(len(facts.deviations), 'deviation')}, listed in the report"


def _classes(rounding: dict[str, str]) -> Iterator[str]:
    """Each class once, with the roles that have it where they do not all have the same."""
    found: dict[str, dict[str, list[str]]] = {}
    for key, value in rounding.items():
        role, _, name = key.partition(": ")
        role, name = (role, name) if role in list(Role) else (str(Role.PREFILL), key)
        found.setdefault(name.replace("_", " "), {}).setdefault(value, []).append(role)
    roles = {role for values in found.values() for having in values.values() for role in having}
    for name, values in found.items():
        reported = (
            value if set(having) == roles else f"{value} ({', '.join(having)})" for value, having in values.items()
        )
        yield f"{name} {', '.join(reported)}"


def ran(traced: Traced) -> Iterator[str]:
    """The kernels that were seen to run, the first few by name; that all of them are torch's, if so."""
    names = traced.distinct
    if names:
        more = f" and {len(names) - _SHOWN_KERNELS} more" if len(names) > _SHOWN_KERNELS else ""
        shown = ", ".join(name[:_NAME_LENGTH] for name in names[:_SHOWN_KERNELS])
        yield f"kernels seen: {shown}{more}"
    elif traced.kernels:
        yield "no kernel of a library was seen to run, only those that torch launches for anybody"


def sampled(backend: BackendSummary) -> Iterator[str]:
    """How much of the cases was judged of which not every row was."""
    chosen = [record.sampled for record in backend.records if record.sampled]
    if chosen:
        least = min(chosen, key=lambda rows: rows["rows"] / rows["of"])
        seen = min(detection(rows["drawn"], _TOUCHED) for rows in chosen)
        yield (
            f"{counted(len(chosen), 'case')} judged by chosen rows, at least {least['rows']} of {least['of']} with "
            f"every head; a defect in {_TOUCHED:.0%} of the rows is among them with probability {seen:.3f}"
        )


def capability_lines(records: Sequence[Record]) -> Iterator[str]:
    """What a bare list of records says of each backend, as at the end of a pytest run."""
    for name, group in by_backend(records).items():
        yield from backend_lines(BackendSummary(BackendFacts(name), summarise(group, {})), columns())
