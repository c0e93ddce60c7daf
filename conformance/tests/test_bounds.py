"""Bounds: what no machine, no reader and no list could take, or what is forged, is refused, cut or ended at once."""

import io
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mla_conformance.backends.foreign import LINE, MESSAGE, AnswerError, cut, reasons_of
from mla_conformance.backends.references import BackendReferenceError, parse_reference
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cli import main
from mla_conformance.commands.reports import FORMATS
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.files import whole
from mla_conformance.files.whole import InputError, read_text, require_writable, write_output
from mla_conformance.judging.record import Record, Status
from mla_conformance.report.terminal import shown, shown_line, shown_lines
from mla_conformance.tests.reports import run_of
from mla_conformance.vocabulary.capabilities import CAPABILITIES


def test_a_case_id_has_ascii_digits_and_no_empty_field() -> None:
    digits = ("q=[٤]", "q=[4x٢]", "q=[(1,٢)x8]", "q=[4];heads=٤", "q=[4];heads=1_0", "q=[4];heads=+4", "q=[4];lse=١")
    empty = ("q=[4];;", "q=[4];", ";q=[4]", "q=[4];;heads=2", "q=[4]; ;heads=2", "q=[4];=2", ";", "q=", "q=[4];data")
    for fields in (*digits, *empty, "q=[4];heads=", "q=[4];dims=١-1-1-1"):
        with pytest.raises(CaseError):
            Case.parse(f"lse:{fields}")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null"), Path.mkdir])
def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(path := tmp_path / "it.py")
    for refuses in (read_text, require_writable, lambda path: write_output(path, "text")):
        with pytest.raises(InputError, match=r"a FIFO, a device or a socket|this is a folder|Is a directory"):
            refuses(path)
    with pytest.raises(BackendReferenceError, match="it is a folder, a FIFO, a device or a socket"):
        parse_reference(f"{path}:Mine")
    assert not path.is_file()


CASES = [case.id for case in CAPABILITIES["lse"].cases[:2]]
PASSED, FAILED = (Record("MINE", "MINE", "lse", case, Status.PASS) for case in CASES)
FAILED = FAILED.with_fields(status=Status.FAIL, check="lse", message="wrong", detail="Traceback\n  line 1")
FORGED = "a\n::error file=x::forged\r\n##[error]f\u2028::set-output name=x::y\x1b[2J\u202eback\ud800 50%0A::warning::w"


def test_files_too_large_to_read_or_not_to_be_written_are_refused(
    tmp_path: Path, refused: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(whole, "MOST_MEBIBYTES", 1)
    (large := tmp_path / "large").write_bytes(bytes(2**20 + 1))
    assert refused("gate", large) == f"mla-conformance: {large}: expected at most 1 MiB, got more\n"
    assert "/dev/zero: cannot be read: expected a regular file, got a " in refused("gate", "/dev/zero")
    for command in (["cheats"], ["defects"], ["minimize", "lse:q=[4]", "--backend", "EAGER", "--device", "cpu"]):
        assert f"{tmp_path}: expected a file, this is a folder" in refused(*command, "--out", tmp_path)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_message_of_fifty_megabytes_is_cut_where_it_is_shown(kind: str) -> None:
    text = FORMATS[kind](run_of([PASSED, FAILED.with_fields(message="y" * 50_000_000)]))
    reported = ElementTree.fromstring(text).findall(".//failure")[0].attrib["message"] if kind == "junit" else text
    assert re.search(r"y…\s+and\s+49,99\d,\d{3}\s+more\s+characters", reported) and len(text) < 50_000


@pytest.mark.parametrize("kind", FORMATS)
def test_no_view_is_obeyed(kind: str) -> None:
    forged = dict.fromkeys(("message", "finding", "reference", "detail"), FORGED)
    run = run_of([FAILED.with_fields(**forged)])
    (backend,) = run.backends
    facts = replace(backend.facts, name=FORGED, rounding={FORGED: FORGED}, deviations=((FORGED, FORGED),))
    heat = {FAILED.case: HeatMap(FORGED, 1, 1, ("9",))}
    forgery = replace(backend, facts=facts, stopped=FORGED, heat=heat)
    absent = replace(backend, facts=replace(facts, reasons=(FORGED,)), capabilities=())
    text = FORMATS[kind](replace(run, environment=dict.fromkeys(run.environment, FORGED), backends=(forgery, absent)))
    assert all(character.isprintable() or character == "\n" for character in text)
    begun = [line.lstrip()[:10] for line in text.splitlines() if line.lstrip().startswith("::")]
    assert begun == (["::error ti", "::warning "] if kind == "annotations" else [])
    assert "##[" not in text


def test_a_text_is_cut_and_escaped_and_nothing_else_is_changed() -> None:
    long = "x" * 2_000_000
    assert [len(reason) < MESSAGE + 99 for reason in reasons_of([long])] == [True]
    with pytest.raises(AnswerError) as refused:
        reasons_of(long)
    assert len(str(refused.value)) < MESSAGE + 200
    honest = "LSE is 5.66 at head 1, expected 3.92: 4.4e+04 × its budget → “wrong” ✘ ä 日本 | # [x] C:: a::b"
    assert shown(honest) == shown_line(honest) == shown_lines(honest) == honest
    assert shown("a\nb\x1b\u202e\ud800\u2028") == r"a\nb\x1b\u202e\ud800\u2028"
    assert shown_line("  ::error::x ##[group]") == r"  \x3a:error::x \x23#[group]"
    assert shown_lines("a\n::b\n\nc") == "a\n\\x3a:b\n\nc"
    assert cut("ä" * 3000) == "ä" * 2048 + "… and 952 more characters" and cut("ab", 2) == "ab"
    assert len(shown_line("x" * LINE)) == LINE


def test_where_only_ascii_can_be_printed(write_report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
