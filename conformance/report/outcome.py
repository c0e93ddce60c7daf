"""The outcome of a run as lines: backend by backend, or of a deployed model as the answer to what is right for it."""

from collections.abc import Iterator
from dataclasses import replace

from mla_conformance.report.answer import Answer, Group, answers, uncovered
from mla_conformance.report.backend_lines import absent_line, backend_lines
from mla_conformance.report.summary import RunSummary
from mla_conformance.report.terminal import cause_lines, wrapped

_INDENT = "       "


def outcome_lines(run: RunSummary, width: int, brief: bool = False) -> Iterator[str]:
    """What is wrong, then all backends; or the groups that backends fall into for a model.

    Args:
        run: what was found.
        width: columns of the lines.
        brief: tell of those that cannot run here, of which nobody asked for any, in one line.
    """
    absent = [backend for backend in run.backends if backend.reasons] if brief else []
    told = replace(run, backends=tuple(backend for backend in run.backends if backend not in absent))
    yield from _answer_lines(told, width) if run.deployment else _lines(told, width)
    if absent:
        yield absent_line(absent, width)


def _lines(run: RunSummary, width: int) -> Iterator[str]:
    yield from cause_lines(run, width)
    for backend in run.backends:
        yield from backend_lines(backend, width)


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


def _group_lines(head: str, found: list[Answer], width: int) -> Iterator[str]:
    if found:
        yield head
    for answer in found:
        yield from wrapped(f"{answer.backend.name}  {answer.told}", width, "  ", _INDENT)
