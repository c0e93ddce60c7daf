"""The calibration of the diagnosis: its counts, what small cases show, and that the stored one is of this code."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from mla_conformance.defects.known import known_defects
from mla_conformance.files.outputs import Section

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("ci_diagnosis", ROOT / "ci" / "diagnosis.py")
assert spec is not None and spec.loader is not None
calibration = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(calibration)
Diagnosis, DiagnosisReport, Outcome = calibration.Diagnosis, calibration.DiagnosisReport, calibration.Outcome
REGENERATE = "run `python ci/diagnosis.py`"
SMALL = "lse:call=context_chunk;dims=small;heads=3;q=[5,1,9];kv=[64,9,130]"


def test_the_stored_calibration_is_of_this_code_and_without_a_confident_error() -> None:
    report = calibration.stored()
    assert report.digest == calibration.digest(), f"the stored calibration is stale; {REGENERATE}"
    calibrated = sum(report.counts["alone"].values())
    # Defects that came since the rule was calibrated are candidates, too; a tenth may wait for the next calibration.
    assert 0.9 * len(known_defects()) <= calibrated <= len(known_defects()), REGENERATE
    assert report.confident_errors == 0
    judged = calibrated - report.number("alone", Outcome.SAID)
    # The others are told nothing: most have errors within two budgets, or NaN as several mistakes have them.
    assert report.number("alone", Outcome.RIGHT) + report.number("alone", Outcome.SILENT) == judged
    assert report.number("alone", Outcome.SILENT) < 0.02 * judged
    assert sum(report.counts["mixed"].values()) >= 200


def test_defects_of_a_small_case_are_told_alone_left_out_and_mixed() -> None:
    found = calibration.diagnoses(SMALL, ["lse-base2-merged-as-natural-prefix-chunk", "rocm-varlen-lse-padded-layout"])
    outcomes = {(each.defect[:4], each.kind): each.outcome for each in found}
    assert outcomes["lse-", "alone"] is outcomes["rocm", "alone"] is Outcome.RIGHT
    assert outcomes["lse-", "left out"] is Outcome.RIGHT, "a suspect is the same mistake"
    assert (
        outcomes["rocm", "left out"]
        is outcomes["lse-", "one head"]
        is outcomes["lse-", "one request"]
        is Outcome.SILENT
    )
    assert Outcome.WRONG not in outcomes.values()


def test_an_exception_is_what_its_message_says() -> None:
    (found,) = calibration.diagnoses(
        "mla_dims:dims=64-64-128-256;heads=2;q=[3];lse=0", ["trtllm-gen-missing-cubin-after-selection"]
    )
    assert found.outcome is Outcome.SAID


@pytest.mark.parametrize(
    ("reported", "right", "certain", "outcome"),
    [
        (False, False, True, Outcome.SILENT),
        (True, True, False, Outcome.RIGHT),
        (True, False, True, Outcome.WRONG),
        (True, False, False, Outcome.UNSURE),
    ],
)
def test_outcomes(reported: bool, right: bool, certain: bool, outcome: str) -> None:
    assert Outcome.of(reported, right, certain) is outcome


FOUND = [
    Diagnosis("a", "alone", Outcome.RIGHT, 0.3, 0.995),
    Diagnosis("b", "alone", Outcome.SAID),
    Diagnosis("a", "left out", Outcome.SILENT, 0.4),
    Diagnosis("a", "one head", Outcome.WRONG, 0.2),
    Diagnosis("a", "two at once", Outcome.UNSURE, 0.1),
]


def test_the_report_counts_and_names_what_was_wrong() -> None:
    report = DiagnosisReport.of(FOUND, "0")
    assert report.confident_errors == 1 and (report.rejected, report.accepted) == (0.4, 0.995)
    said = calibration.sentence(report)
    assert "wrong numbers: 1 right, 0 wrong with confidence of 1" in said
    assert "mixtures: 0 right, 1 wrong with confidence of 2" in said
    lines = "\n".join(calibration.terminal_lines(report))
    assert "WRONG one head: a (wrong with confidence)" in lines and "at least 0.9950" in lines


def test_the_page_holds_the_stored_sentence() -> None:
    written = Section.of(calibration.PAGE, "diagnosis").content.strip()
    assert written == f"{calibration.sentence(calibration.stored())} (`python ci/diagnosis.py`).", REGENERATE


def test_the_script_writes_the_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, stored = tmp_path / "page.md", tmp_path / "diagnosis.json"
    page.write_text("before\n<!-- diagnosis:begin -->old<!-- diagnosis:end -->\nafter\n")
    for name, value in {"calibrate": lambda: FOUND, "STORED": stored, "PAGE": page}.items():
        monkeypatch.setattr(calibration, name, value)
    assert calibration.main() == 1
    assert json.loads(stored.read_text())["counts"]["alone"] == {"right": 1, "no wrong number": 1}
    assert calibration.stored() == DiagnosisReport.of(FOUND, calibration.digest())
    assert "Diagnosis of known defects" in capsys.readouterr().out
    assert page.read_text().startswith("before\n<!-- diagnosis:begin -->\nDiagnosis of known defects")
