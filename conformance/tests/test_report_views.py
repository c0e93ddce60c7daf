"""The views of a report: one page that needs nothing else, Markdown and annotations in which nothing is markup."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mla_conformance.commands.reports import FORMATS
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.judging.record import BackendFacts, Confirmed, Record, Status
from mla_conformance.report.ci_views import annotations, junit, markdown
from mla_conformance.report.html import html
from mla_conformance.report.json_report import load_report
from mla_conformance.report.summary import BackendSummary, RunSummary, summarise
from mla_conformance.vocabulary.capabilities import Tier, find_capability

ENVIRONMENT = {"suite": "1", "tier": "full", "device": "a<b", "torch": "2"}
NASTY = 'a|b `c` <script>alert("x")</script> 50%\n::error::d, e: [f](g)'


class Page(HTMLParser):
    """Tags, links and text of a page; every tag that is opened must be closed."""

    VOID = frozenset(("meta", "line", "rect", "br", "input"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def values(self, attribute: str) -> list[str]:
        return [value for name, value in self.attributes if name == attribute]


def nasty_run() -> RunSummary:
    said = {"message": NASTY, "check": "lse", "clause": "4.2", "explanation": NASTY}
    record = Record("B'", "my file.py:B'", "lse", "lse:q=[1]", Status.FAIL).with_fields(**said)
    facts = BackendFacts("B'", "my file.py:B'", emulated=True, deviations=((NASTY, NASTY),))
    heat = {record.case: HeatMap(NASTY, 1, 3, ("019",))}
    failing = BackendSummary(facts, summarise([record], ["lse"] * 2), heat=heat)
    absent = BackendSummary(BackendFacts("C", reasons=(NASTY,)))
    return RunSummary(ENVIRONMENT, (failing, absent), ("lse:q=[1]", "lse:q=[2]"))


def test_the_page_of_a_real_run_needs_nothing_else_and_is_for_every_screen_and_reader(real_run: Path) -> None:
    text = (real_run / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert text == html(load_report(real_run / "report.json"))
    assert not re.search(r"https?://|@import|url\(", text) and not {"link", "img", "iframe"} & set(page.tags)
    assert not page.values("src") and all(target.startswith("#") for target in page.values("href"))
    assert {target[1:] for target in page.values("href")} <= set(page.values("id"))
    assert 'lang="en"' in text and 'name="viewport"' in text and "prefers-color-scheme: dark" in text
    assert page.tags.count("th") == len(page.values("scope")) > 0
    named = [label for label in page.values("aria-label") if "cases, median" in label]
    titled = re.findall(r'<svg role="img"[^>]*>\n<title>LSE of [a-z 0-9]+, by head and row</title>', text)
    assert page.tags.count("svg") == len(named) + len(titled) and named and titled


def test_the_page_tells_what_a_person_needs(real_run: Path) -> None:
    text = (real_run / "report.html").read_text(encoding="utf-8")
    words = " ".join(" ".join(Page(text).words).split())
    run = load_report(real_run / "report.json")
    for record in run.records:
        if record.failed:
            assert record.replay in words and record.message in words
    lse = len(find_capability("lse").select(Tier.SMOKE))
    assert "Broken · lse" in words and f"✔ {lse}/{lse}" in words and f"✘ 0/{lse}" in words and "– unsupported" in words
    assert "FLASH_ATTN" in words and "package flash-attn not installed" in words and "<b>tile & co</b>" in words
    assert "emulated" in words and "torch 2" in words
    assert "Expected failures" in words and ": bug: base 2" in words
    assert run.date and f"{run.date} · judging took " in words
    assert "4 cases wrong, most likely because: perhaps The LSE is in base 2" in words  # not all that is wrong with it
    assert "Why unsupported" in words and "TORCH_SDPA: 4 cases, 1 reason" in words
    assert re.search(r"right: \d+ of \d+ prefill cases \(4 unsupported\)", words) and "compute_capability" not in words


@pytest.mark.parametrize("view", [html, markdown, annotations])
def test_a_replay_line_is_as_one_would_type_it(real_run: Path, monkeypatch: Any, view: Any) -> None:
    run = load_report(real_run / "report.json")
    assert f"--backend {real_run.parent}/broken.py:Broken" in view(run)
    monkeypatch.chdir(real_run.parent)
    assert "--backend broken.py:Broken" in view(run) and f"--backend {real_run.parent}" not in view(run)


def test_nothing_of_a_report_is_markup_and_annotations_are_one_escaped_line_each() -> None:
    page = Page(html(nasty_run()))
    assert page.tags.count("script") == 1 and sum('<script>alert("x")' in words for words in page.words) == 13
    text = markdown(nasty_run())
    assert "<script" not in text.replace(r"\<script", "") and r"a\|b \`c\`" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 3 and all(len(re.findall(r"(?<!\\)\|", row)) == 9 for row in rows)
    error, warning = annotations(nasty_run()).splitlines()
    assert error.startswith("::error title=B'%3A 1 case of lse::a|b `c` <script>") and "50%25%0A\\x3a:error::d" in error
    assert error.endswith(f"replay: {nasty_run().records[0].replay}")
    assert warning.startswith("::warning title=C unavail")
    odd = BackendSummary(BackendFacts("a: b, 50%", reasons=("x",)))
    assert annotations(RunSummary(ENVIRONMENT, (odd,))).startswith("::warning title=a%3A b%2C 50%25 unavailable::x")


def test_the_step_summary_is_appended_and_junit_counts_and_says_how_to_see_it_again(real_run: Path) -> None:
    run, summary = load_report(real_run / "report.json"), real_run.with_name("summary.md").read_text(encoding="utf-8")
    assert summary.startswith("before\n## MLA conformance\n")
    assert f"| EAGER | ✅ pass | {len(run.cases)} / {len(run.cases)} | 0 | 0 | 0 |" in summary
    root = ElementTree.fromstring(junit(run))
    suites = {suite.attrib["name"]: suite for suite in root}
    assert suites.keys() == {backend.name for backend in run.backends}
    for backend in run.backends:
        failed = sum(record.failed for record in backend.records)
        tests = max(1, len(backend.records))
        assert (suites[backend.name].get("failures"), suites[backend.name].get("tests")) == (str(failed), str(tests))
    (skipped,) = suites["FLASH_ATTN"].findall("testcase/skipped")
    assert "flash-attn not installed" in skipped.attrib["message"]
    reported = [failure.text or "" for failure in suites["Broken"].findall("testcase/failure")]
    assert reported and all("replay: mla-conformance replay" in text for text in reported)


def test_junit_holds_what_is_no_xml_and_tells_failures_from_breakdowns() -> None:
    run = nasty_run()
    (record,) = run.records
    records = [record.with_fields(message="\0\x1b[31m<&", detail=NASTY), record.with_fields(status=Status.TIMEOUT)]
    backend = replace(run.backends[0], capabilities=summarise(records))
    (suite,) = ElementTree.fromstring(junit(replace(run, backends=(backend,))))
    (failure,), (error,) = suite.findall("testcase/failure"), suite.findall("testcase/error")
    assert failure.attrib["message"] == r"\x00\x1b[31m<&" and NASTY.replace("::e", r"\x3a:e") in (failure.text or "")
    assert error.attrib["message"] == NASTY.replace("\n", r"\n") and suite.get("errors") == "1"


CONFIRMED: dict[Confirmed, tuple[tuple[str, ...], str]] = {
    "after": (("lse:q=[1]", "lse:q=[2]"), "fails only after 2 other cases: lse:q=[1], lse:q=[2]"),
    "unrepeated": ((), "did not fail again, neither alone nor after the same cases"),
}


@pytest.mark.parametrize("confirmation", CONFIRMED)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_view_tells_a_failure_that_does_not_repeat_alone(kind: str, confirmation: Confirmed) -> None:
    after, said = CONFIRMED[confirmation]
    record = Record("B", "B", "lse", "lse:q=[3]", Status.FAIL, message="wrong", confirmation=confirmation, after=after)
    alone = record.with_fields(confirmation="alone", after=())
    for shown, there in ((record, True), (alone, False)):
        backend = BackendSummary(BackendFacts("B", "B"), summarise([shown]))
        text = FORMATS[kind](RunSummary(ENVIRONMENT, (backend,), ("lse:q=[3]",))).replace("\\", "")
        assert (said in text) is there


def test_a_map_stands_at_its_own_failure_and_why_the_rest_was_not_run_beside_its_number() -> None:
    stopped = replace(nasty_run().backends[0], stopped="gave up after 5 equal failures of its process")
    for kind in ("text", "html", "markdown"):
        text = FORMATS[kind](replace(nasty_run(), backends=(stopped,)))
        assert "1 NOT RUN: gave up after 5 equal failures of its process" in text, kind
    run = nasty_run()
    (record,), (backend, _) = run.records, run.backends
    records = [record.with_fields(case="lse:q=[1]"), record.with_fields(case="lse:q=[2]")]
    other = replace(backend, capabilities=summarise(records), heat={"lse:q=[2]": HeatMap("LSE", 1, 1, ("9",))})
    text = html(replace(run, backends=(other,)))
    assert text.count("<figure>") == 1 and text.index("1 more") < text.index("<figure>")


@pytest.mark.parametrize(
    ("kind", "said"),
    [("junit", '<testsuite name="Broken"'), ("text", "wrong: Broken, 1 likely cause, 4 cases: perhaps The LSE is in ")],
)
def test_render_prints_or_writes(real_run: Path, tmp_path: Path, ours: Any, kind: str, said: str) -> None:
    render, out = ("report", "render", real_run / "report.json"), tmp_path / "out"
    status, printed, _ = ours(*render, "--format", kind)
    assert status == ours(*render, "--format", kind, "--out", out)[0] == 0
    assert said in printed and out.read_text(encoding="utf-8").strip() == printed.strip()
    status, _, said = ours(*render, "--out", out / "below")
    assert status == 2 and "cannot be written: " in said
