"""The outcome of a run as one HTML page that needs no other file, and what pages share: templates, cells, pictures."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mla_conformance.diagnosis.heat_map import BEYOND, HeatMap
from mla_conformance.judging.record import EXPLORED, Status
from mla_conformance.judging.traits import ASKED, Answer, ErrorSpread, Question, Traits, summed_up
from mla_conformance.report import causes, summary
from mla_conformance.report.outcome import ANSWER_SIGN, answers, closing_line, from_here, judged_of_claimed, refusing
from mla_conformance.report.terminal import MESSAGE, counted, shown, shown_lines
from mla_conformance.speed.times import remarks_of, table_of
from mla_conformance.vocabulary.capabilities import CAPABILITIES


@cache
def pages(room: str) -> Environment:
    """The templates of a room, the package that holds them, and what these import; they take long to compile."""
    loader = ChoiceLoader([PackageLoader(package, ".") for package in (room, "mla_conformance.report")])
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.undefined = StrictUndefined  # all names must be given
    environment.finalize = lambda value: shown_lines(value, MESSAGE) if type(value) is str else value  # else markup
    environment.filters["whole"] = lambda text: Markup.escape(shown_lines(text))  # a traceback, or a command to copy
    environment.globals.update(counted=counted, definition=definition, words=words, questions=ASKED, beyond=BEYOND)
    drawn = (answer_cell, spread_rows, places, outlines, pixels, in_words, table_of, remarks_of)
    environment.globals.update({each.__name__: each for each in drawn})
    return environment


def cell(capability: summary.CapabilitySummary) -> dict[str, str]:
    outcome, counts = capability.outcome, capability.counts
    if outcome is summary.BackendOutcome.UNSUPPORTED:
        return {"style": outcome, "sign": capability.sign, "counts": "", "note": "unsupported"}
    style = "waived" if capability.sign == summary.FORESEEN else outcome.value
    named = {"not_run": "not run", "unavailable": "unavailable", "unsupported": "unsupported"}
    notes = counts.noted(**named, waived="expected to fail")
    held = f"{counts.passed}/{counts.judged}"
    return {"style": style, "sign": capability.sign, "counts": held, "note": ", ".join(notes)}


def definition(name: str) -> str:
    """What a capability says, in one sentence; empty for one that this suite does not have."""
    if name == EXPLORED:
        return "Cases drawn beyond the list, until one fails."
    return CAPABILITIES[name].definition if name in CAPABILITIES else ""


_STYLE = {Answer.YES: "pass", Answer.NO: "fail", Answer.NOT_APPLICABLE: "unsupported"}
# Pixels of a picture from left to right, the error at its left edge, and powers of ten up to its right one.
_WIDTH, _LEAST, _DECADES = 120, 1e-3, 4


def in_words(spread: ErrorSpread) -> str:
    budget, ulp = (" / ".join(f"{number:.2g}" for number in numbers) for numbers in (spread.budget, spread.ulp))
    return f"{budget} · {ulp} ulp"


def answer_cell(traits: Traits, question: Question) -> dict[str, str] | None:
    """The answer over all roles, with counterexamples; None where nobody asked."""
    answers = traits.answers(question)
    if not answers:
        return None
    summed = summed_up(answers.values())
    decisive = {role: each for role, each in answers.items() if each.answer is summed}
    why = "; ".join(f"{role}: {each.why}" for role, each in decisive.items() if summed is Answer.NO)
    roles = "" if summed is Answer.NOT_APPLICABLE else f" {', '.join(decisive)}"
    return {"style": _STYLE[summed], "text": f"{ANSWER_SIGN[summed]}{roles}", "why": why}


def spread_rows(kernels: Sequence[tuple[str, Traits]]) -> list[tuple[str, list[ErrorSpread | None]]]:
    """A row for each role, dtype and regime, with each kernel's errors there."""
    found = [{f"{x.role} · {x.dtype} · {x.data}": x for x in traits.accuracy} for _, traits in kernels]
    return [(key, [spreads.get(key) for spreads in found]) for key in dict.fromkeys(chain(*found))]


def places(spread: ErrorSpread) -> list[float]:
    """Median, 99th percentile and worst error by budget, and the limit of 1, in a picture of powers of ten."""
    decades = (math.log10(max(number, _LEAST) / _LEAST) for number in (*spread.budget, 1.0))
    return [3 + (_WIDTH - 6) * min(each / _DECADES, 1.0) for each in decades]


def words(heat_map: HeatMap) -> str:
    several = "the worst of several in a cell; " if heat_map.cells < heat_map.heads * heat_map.rows else ""
    return (
        f"{heat_map.part}: {heat_map.wrong} of {counted(heat_map.cells, 'cell')} over their budget; "
        f"{counted(heat_map.heads, 'head')} down, {counted(heat_map.rows, 'row')} to the right; "
        f"{several}stronger colour = further over budget"
    )


def outlines(heat_map: HeatMap) -> Iterator[tuple[int, Markup]]:
    """Each digit over the budget that a map has, with its cells as a path; neighbours in a line are one."""
    for digit in range(1, BEYOND + 1):
        found = ((y, run.span()) for y, line in enumerate(heat_map.lines) for run in re.finditer(f"{digit}+", line))
        if runs := "".join(f"M{left} {y}h{end - left}v1h-{end - left}z" for y, (left, end) in found):
            yield digit, Markup(runs)


def pixels(heat_map: HeatMap) -> int:
    """Of the side of a cell: 12, but of the longer side of a picture 256 at most."""
    return min(12, 256 // max(len(heat_map.lines), len(heat_map.lines[0])))


def picture_file(heat_map: HeatMap) -> str:
    return pages("mla_conformance.report").get_template("heat.svg.j2").render(heat_map=heat_map) + "\n"


def html(run: summary.RunSummary) -> str:
    run_backends = [backend for backend in run.backends if not backend.reasons]
    expected = (record for record in run.records if record.status is Status.EXPECTED_FAILURE)
    waived = causes.grouped(expected, lambda record: (record.backend, record.expectation))
    names = list(dict.fromkeys(c.name for backend in run_backends for c in backend.capabilities))
    named = [{each.name: each for each in backend.capabilities} for backend in run_backends]
    matrix = []  # a cell for each backend that was asked, and where its failures stand, if it has any
    for name in names:
        selected = [(backend, own.get(name)) for backend, own in zip(run_backends, named, strict=True)]
        cells = [each and (cell(each), shown(f"{b.name}-{name}") if each.failures else "") for b, each in selected]
        matrix.append((name, definition(name), cells))
    refusals = []  # why cases are unsupported, the reason for most first: said, how many cases, of which capabilities
    for backend in run_backends:
        refused = (record for record in backend.records if record.status is Status.UNSUPPORTED)
        groups = causes.grouped(refused, lambda record: record.message).items()
        rows = [(said, len(of), ", ".join(dict.fromkeys(record.capability for record in of))) for said, of in groups]
        refusals += [(backend, sorted(rows, key=lambda row: -row[1]))] if rows else []
    passes = (r for each in run_backends for r in each.records if r.status is Status.PASS and any(r.shares.values()))
    near = [(record, *max(record.shares.items(), key=lambda item: item[1])) for record in passes]  # rule and share
    budget = []  # for each rule the passed cases that it applied to, by the 20th part of its limit that they used
    for backend in run_backends:
        used, bars = [record.shares for record in backend.records if record.status is Status.PASS], []
        for rule, title in (("element", "each element"), ("row", "each row"), ("lse", "each LSE")):
            if shares := [share[rule] for share in used if share.get(rule)]:
                said = f"{len(shares)} cases, median {statistics.median(shares):.2f}, largest {max(shares):.2f}"
                counts = Counter(min(int(share * 20), 19) for share in shares)
                bars.append({"title": title, "words": said, "bins": [counts[number] for number in range(20)]})
        budget += [(backend, bars)] if bars else []
    timed = [(backend.name, backend.speed) for backend in run_backends if backend.speed]
    told: dict[str, Any] = {"run": run, "deployment": str(run.deployment or ""), "closing": closing_line(run)}
    told["outcome"] = {0: "pass", 1: "fail"}.get(run.exit_status, "not_run")
    told |= {"judged_backends": run_backends, "timed": timed, "matrix": matrix, "refusals": refusals, "budget": budget}
    told |= {"answers": answers(run) if run.deployment else [], "judged_of_claimed": judged_of_claimed}
    told["traits_of"] = [(backend.name, backend.traits) for backend in run_backends]
    told["waived"] = [(reason, records) for (_, reason), records in waived.items()]
    told["verdicts"] = [(backend, summary.SIGN[backend.outcome], _verdict(backend)) for backend in run.backends]
    told["closest"] = sorted(near, key=lambda case: -case[2])[:8]
    told["anchor"] = lambda backend, capability: shown(f"{backend}-{capability}")
    told["replay"] = lambda record: from_here(record).replay
    return pages("mla_conformance.report").get_template("page.html.j2").render(told)


def _verdict(backend: summary.BackendSummary) -> str:
    """What is said of a backend in one sentence, with the likely cause of its failures, or what is seen of most."""
    counts = backend.counts
    if counts.failed:
        first, *others = backend.causes
        part = f", {len(first.failures)} of them" if others else ""
        if first.kind == "likely":
            part = f"{part or ','} most likely because"
        likely = sum(cause.kind == "likely" for cause in others)
        more = f"; {counted(likely, 'other likely cause')}" if likely else ""
        return f"{counted(counts.failed, 'case')} wrong{part}: {first.sentence}{more}"
    if backend.reasons or backend.not_run:
        return "; ".join(backend.reasons) or backend.not_run
    if said := refusing(backend):
        return said
    if backend.outcome is not summary.BackendOutcome.PASS:
        return "nothing was judged"
    if not counts.waived:
        return f"right: {summary.right_on(backend.records)}"
    rest = counts.noted(unsupported="unsupported", unavailable="unavailable")
    return "; ".join([f"wrong, as expected, on {counts.waived:,} of {counted(counts.verdicts, 'case')}", *rest])
