"""What was found of a kernel beside verdicts, for people: lines of text, and a table and pictures for pages."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from mla_conformance.judging.traits import ASKED, Answer, ErrorSpread, Question, Traits, summed_up
from mla_conformance.report.causes import grouped

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
    """Median, 99th percentile and worst error, by budget and by the last place."""
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
