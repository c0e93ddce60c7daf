"""Reports from elsewhere: what is too large, too deep or forged is refused; what is shown is not obeyed or endless."""

import io
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mla_conformance.backends.foreign import LINE, cut
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cli import main
from mla_conformance.commands.reports import FORMATS
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.files import whole
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.loading import load_report
from mla_conformance.report.terminal import shown, shown_line, shown_lines
from mla_conformance.vocabulary.capabilities import CAPABILITIES

CASES = [case.id for case in CAPABILITIES["lse"].cases[:2]]
PASSED, FAILED = (Record("MINE", "MINE", "lse", case, Status.PASS) for case in CASES)
FAILED = FAILED.with_fields(status=Status.FAIL, check="lse", message="wrong", detail="Traceback\n  line 1")
FORGED = "a\n::error file=x::forged\r\n##[error]f\u2028::set-output name=x::y\x1b[2J\u202eback\ud800 50%0A::warning::w"
Write = Callable[..., Path]


def gate(capsys: pytest.CaptureFixture[str], file: Path) -> tuple[int, str]:
    status = main(["gate", str(file), "--require-tier", "none"])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("lse:q=[1x65537]", "field q: expected at most 65,536 requests, got 65,537"),
        ("lse:q=[2000000000,2000000000]", "expected at most 2,147,483,648 tokens, got 4,000,000,000 new ones and 0"),
        ("lse:q=[1];seed=-9999999999", "field seed: expected at most 2,147,483,648, got -9999999999"),
        ("chunked_context:q=[1];kv=[2000000000];workspace=1;page=1", "contexts in at most 262,144 slices, got 2,000,0"),
        ("lse:q=[1];dims=" + "9" * 5000 + "-1-1-1", "unknown dims '999"),
    ],
)
def test_what_a_case_may_ask_for_is_bounded(case: str, said: str) -> None:
    with pytest.raises(CaseError) as refused:
        Case.parse(case)
    assert said in str(refused.value)
    assert len(Case.parse("lse:q=[1x65536]").q) == 65536


def test_a_large_file_and_an_endless_one_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "MOST_MEBIBYTES", 1)
    (large := tmp_path / "large").write_bytes(bytes(2**20 + 1))
    assert gate(capsys, large) == (2, f"mla-conformance: {large}: expected at most 1 MiB, got more\n")
    assert "/dev/zero: cannot be read: expected a regular file, got a " in gate(capsys, Path("/dev/zero"))[1]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_message_of_fifty_megabytes_is_cut_where_it_is_shown(write_report: Write, kind: str) -> None:
    message = "y" * 50_000_000
    run = load_report(write_report("a.json", [PASSED, FAILED]))
    (backend,) = run.backends
    (capability,) = backend.capabilities
    long = replace(capability, records=(PASSED, FAILED.with_fields(message=message)))
    text = FORMATS[kind](replace(run, backends=(replace(backend, capabilities=(long,)),)))
    reported = ElementTree.fromstring(text).findall(".//failure")[0].attrib["message"] if kind == "junit" else text
    assert re.search(r"y…\s+and\s+49,99\d,\d{3}\s+more\s+characters", reported) and len(text) < 50_000


@pytest.mark.parametrize("kind", FORMATS)
def test_no_view_is_obeyed(write_report: Write, kind: str) -> None:
    run = load_report(write_report("a.json", [PASSED, FAILED]))
    (backend,) = run.backends
    (capability,) = backend.capabilities
    forged = FAILED.with_fields(message=FORGED, finding=FORGED, reference=FORGED, detail=FORGED)
    facts = replace(backend.facts, name=FORGED, rounding={FORGED: FORGED}, deviations=((FORGED, FORGED),))
    heat = {forged.case: HeatMap(FORGED, 1, 1, ("9",))}
    kept = (replace(capability, records=(forged,)),)
    forgery = replace(backend, facts=facts, capabilities=kept, stopped=FORGED, heat=heat)
    absent = replace(backend, facts=replace(facts, reasons=(FORGED,)), capabilities=())
    text = FORMATS[kind](replace(run, environment=dict.fromkeys(run.environment, FORGED), backends=(forgery, absent)))
    assert all(character.isprintable() or character == "\n" for character in text)
    begun = [line.lstrip()[:10] for line in text.splitlines() if line.lstrip().startswith("::")]
    assert begun == (["::error ti", "::warning "] if kind == "annotations" else [])
    assert "##[" not in text


def test_a_text_is_cut_and_escaped_and_nothing_else_is_changed() -> None:
    honest = "LSE is 5.66 at head 1, expected 3.92: 4.4e+04 × its budget → “wrong” ✘ ä 日本 | # [x] C:: a::b"
    assert shown(honest) == shown_line(honest) == shown_lines(honest) == honest
    assert shown("a\nb\x1b\u202e\ud800\u2028") == r"a\nb\x1b\u202e\ud800\u2028"
    assert shown_line("  ::error::x ##[group]") == r"  \x3a:error::x \x23#[group]"
    assert shown_lines("a\n::b\n\nc") == "a\n\\x3a:b\n\nc"
    assert cut("ä" * 3000) == "ä" * 2048 + "… and 952 more characters" and cut("ab", 2) == "ab"
    assert len(shown_line("x" * LINE)) == LINE


def test_where_only_ascii_can_be_printed(write_report: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    report = write_report("a.json", [PASSED, FAILED.with_fields(message="3 × its budget ✘")])
    for kind in FORMATS:
        printed = io.TextIOWrapper(io.BytesIO(), "ascii", "strict")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", printed)
            assert main(["report", "render", str(report), "--format", kind]) == 0
        printed.seek(0)
        text = printed.read()
        if kind == "junit":
            assert "3 × its budget ✘" in ElementTree.fromstring(text)[0][1][0].attrib["message"]
        else:
            assert r"3 \xd7 its budget \u2718" in text.replace("\\\\", "\\") or kind == "html"
