"""What HTML pages have in common: templates in one look, texts escaped and cut, cells of matrices, and pictures.

A heat map is SVG that takes the colours of the page it stands on, or has its own as a file.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import groupby
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mla_conformance.diagnosis.heat_map import BEYOND, HeatMap
from mla_conformance.judging.record import EXPLORED
from mla_conformance.judging.traits import ASKED, Answer, ErrorSpread, Question, Traits, summed_up
from mla_conformance.report.causes import grouped
from mla_conformance.report.summary import FORESEEN, SIGN, BackendOutcome, CapabilitySummary
from mla_conformance.report.terminal import MESSAGE, counted, shown, shown_lines
from mla_conformance.vocabulary.capabilities import CAPABILITIES


def render(room: str, template: str, **values: Any) -> str:
    """A page of a room, the package that holds the template and may hold what that imports; all names must be given."""
    return _environment(room).get_template(template).render(**values)


@cache
def _environment(room: str) -> Environment:
    """That of a room, whose templates take half a second to compile."""
    loader = ChoiceLoader([PackageLoader(package, ".") for package in (room, "mla_conformance.report")])
    environment = Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: shown_lines(value, MESSAGE) if type(value) is str else value,  # else it is markup
    )
    environment.filters["whole"] = lambda text: Markup.escape(shown_lines(text))  # a traceback, or a command to copy
    return environment


@dataclass(frozen=True)
class Cell:
    """One capability of one backend: its outcome as a class of styles, a sign, figures and words."""

    style: str
    sign: str
    counts: str
    note: str


def cell(capability: CapabilitySummary) -> Cell:
    outcome, counts = capability.outcome, capability.counts
    if outcome is BackendOutcome.UNSUPPORTED:
        return Cell(outcome, SIGN[outcome], "", "unsupported")
    style, sign = (
        ("waived", FORESEEN) if outcome is BackendOutcome.PASS and counts.waived else (outcome.value, SIGN[outcome])
    )
    notes = counts.noted(
        not_run="not run", unavailable="unavailable", unsupported="unsupported", waived="expected to fail"
    )
    return Cell(style, sign, f"{counts.passed}/{counts.judged}", ", ".join(notes))


def definition(name: str) -> str:
    """What a capability says, in one sentence; empty for one that this suite does not have."""
    if name == EXPLORED:
        return "Cases drawn beyond the list, until one fails."
    return CAPABILITIES[name].definition if name in CAPABILITIES else ""


_SIGN = {Answer.YES: "✔", Answer.NO: "✘", Answer.NOT_APPLICABLE: "–"}
_STYLE = {Answer.YES: "pass", Answer.NO: "fail", Answer.NOT_APPLICABLE: "unsupported"}
_WIDTH, _HEIGHT, _LEAST, _DECADES = 120, 12, 1e-3, 4
"""Pixels of a picture, the error at its left edge, and powers of ten up to its right one."""


def traits_lines(traits: Traits) -> Iterator[str]:
    """A line for each question, with counterexamples, and one for each role and dtype."""
    for question in Question if traits.bitwise else ():
        answers = traits.answers(question)
        reported = ", ".join(f"{role} {_SIGN[each.answer]}" for role, each in answers.items())
        yield f"same bits {ASKED[question]}: {reported}"
        yield from (f"  {role}: {each.why}" for role, each in answers.items() if each.answer is Answer.NO)
    for (role, dtype), spreads in grouped(traits.accuracy, lambda each: (each.role, each.dtype)).items():
        most = max(spreads, key=lambda each: each.budget[-1])  # of the regimes, the one with the largest error
        median, tail, worst = most.budget
        said = f"{worst:.2g} of the budget at worst, 99 % within {tail:.2g}, median {median:.2g} ({most.data})"
        yield f"errors of {role} {dtype}: {said}"


def in_words(spread: ErrorSpread) -> str:
    budget, ulp = (" / ".join(f"{number:.2g}" for number in numbers) for numbers in (spread.budget, spread.ulp))
    return f"{budget} · {ulp} ulp"


@dataclass(frozen=True)
class AnswerCell:
    style: str  # class of styles
    text: str  # sign and roles
    why: str  # counterexamples, or what keeps it from being asked


def answer_cell(traits: Traits, question: Question) -> AnswerCell | None:
    """The answer over all roles, with counterexamples; None where nobody asked."""
    answers = traits.answers(question)
    if not answers:
        return None
    summed = summed_up(answers.values())
    decisive = {role: each for role, each in answers.items() if each.answer is summed}
    why = "; ".join(f"{role}: {each.why}" for role, each in decisive.items() if summed is Answer.NO)
    roles = "" if summed is Answer.NOT_APPLICABLE else f" {', '.join(decisive)}"
    return AnswerCell(_STYLE[summed], f"{_SIGN[summed]}{roles}", why)


def spread_rows(kernels: Sequence[tuple[str, Traits]]) -> list[tuple[str, list[ErrorSpread | None]]]:
    """A row for the same cases of all kernels: role, dtype and regime, and each kernel's errors there."""
    found = [{(each.role, each.dtype, each.data): each for each in traits.accuracy} for _, traits in kernels]
    keys = dict.fromkeys(key for spreads in found for key in spreads)
    return [(" · ".join(key), [spreads.get(key) for spreads in found]) for key in keys]


def spread_picture(spread: ErrorSpread) -> str:
    """Median, 99th percentile and worst error by budget on a scale of powers of ten, with a line at the limit of 1."""
    decades = (math.log10(max(number, _LEAST) / _LEAST) for number in (*spread.budget, 1.0))
    median, tail, worst, limit = (3 + (_WIDTH - 6) * min(each / _DECADES, 1.0) for each in decades)
    middle = _HEIGHT / 2
    return (
        f'<svg role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}">'
        f"<title>{escape(in_words(spread))}</title>"
        f'<path stroke="currentColor" stroke-dasharray="2" d="M{limit:.1f} 0v{_HEIGHT}"/>'
        f'<path stroke="currentColor" d="M{median:.1f} {middle}H{worst:.1f}"/>'
        f'<rect x="{median - 1.5:.1f}" y="2" width="3" height="{_HEIGHT - 4}"/>'
        f'<rect x="{tail - 1:.1f}" y="3" width="2" height="{_HEIGHT - 6}"/>'
        f'<circle cx="{worst:.1f}" cy="{middle}" r="2.5" fill="currentColor"/></svg>'
    )


VIEW = {
    "questions": ASKED,
    "answer_cell": answer_cell,
    "spread_rows": spread_rows,
    "picture": spread_picture,
    "words": in_words,
}
"""What the templates show traits with."""


_SIDE, _CELL = 256, 12  # pixels: of the longer side, at most, and of a cell
_MARGIN, _LETTER = 24, 6  # pixels of a file: above the picture, and of a letter of its words


def words(heat_map: HeatMap) -> str:
    """What the picture shows, for who sees none and for who does not know what it means."""
    several = "the worst of several in a cell; " if heat_map.cells < heat_map.heads * heat_map.rows else ""
    return (
        f"{heat_map.part}: {heat_map.wrong} of {counted(heat_map.cells, 'cell')} over their budget; "
        f"{counted(heat_map.heads, 'head')} down, {counted(heat_map.rows, 'row')} to the right; "
        f"{several}stronger colour = further over budget"
    )


def picture(heat_map: HeatMap) -> str:
    """The cells as an element of a page, whose styles decide the colours: ``ground``, ``over`` and ``between``."""
    down, right, cell = len(heat_map.lines), len(heat_map.lines[0]), _pixels(heat_map)
    between = [f"M0 {y}h{right}" for y in range(1, down)] + [f"M{x} 0v{down}" for x in range(1, right)]
    return (
        f'<svg role="img" viewBox="0 0 {right} {down}" width="{right * cell}" height="{down * cell}">\n'
        f"<title>{_text(heat_map.part)}, by head and row</title>\n"
        f'<path class="ground" d="M0 0h{right}v{down}H0z" fill="#eef1f4"/>\n'
        f"{''.join(_over(heat_map, digit) for digit in range(1, BEYOND + 1))}"
        f'<path class="between" d="{"".join(between)}" stroke="#fff" stroke-width="0.1"/>\n</svg>'
    )


def picture_file(heat_map: HeatMap) -> str:
    said = _text(words(heat_map))
    width, height = max(_SIDE, _LETTER * len(said)), _MARGIN + len(heat_map.lines) * _pixels(heat_map)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">\n'
        f"<title>{said}</title>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n'
        f'<text y="{_MARGIN - 8}" font-family="sans-serif" font-size="11">{said}</text>\n'
        f'<g transform="translate(0 {_MARGIN})">{picture(heat_map)}</g>\n</svg>\n'
    )


def _pixels(heat_map: HeatMap) -> int:
    return min(_CELL, _SIDE // max(len(heat_map.lines), len(heat_map.lines[0])))


def _over(heat_map: HeatMap, digit: int) -> str:
    """The cells of this digit, neighbours in a line as one; nothing where there are none."""
    runs = []
    for y, line in enumerate(heat_map.lines):
        x = 0
        for each, group in groupby(line):
            many = len(list(group))
            runs += [f"M{x} {y}h{many}v1h-{many}z"] if each == str(digit) else []
            x += many
    further = f"up to 10^{digit} times the budget" if digit < BEYOND else "further over the budget, or no number"
    opacity = 0.5 + 0.5 * digit / BEYOND  # the least stands out from the ground, too
    path = f'<path class="over" d="{"".join(runs)}" fill="#a8071a" fill-opacity="{opacity:.2f}">'
    return f"{path}<title>{further}</title></path>\n" if runs else ""


def _text(text: str) -> str:
    return escape(shown(text))
