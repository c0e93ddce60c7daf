"""``defects``: the judge judged, by known wrong kernels and honest ones."""

import argparse

from mla_conformance.defects.calibration import calibrate
from mla_conformance.defects.diagnosis_report import DiagnosisReport, digest
from mla_conformance.defects.diagnosis_report import terminal_lines as diagnosis_lines
from mla_conformance.defects.digest import deciding_digest
from mla_conformance.defects.matrix import run_matrix
from mla_conformance.defects.report import markdown, summarise, terminal_lines
from mla_conformance.files.inputs import InputError
from mla_conformance.files.sections import Section
from mla_conformance.report.json_report import write_json
from mla_conformance.report.terminal import say
from mla_conformance.vocabulary.capabilities import CapabilityError, find_tier


def run_defects(options: argparse.Namespace) -> int:
    """Judge them all, say and write what came of it; the exit status."""
    try:
        tier = find_tier(options.tier)
    except CapabilityError as error:
        raise InputError(str(error)) from error
    if options.diagnosis:
        return _calibrate(options)
    page = Section.of(options.page, "defects") if options.page else None  # known before anything is run
    digest = deciding_digest()  # of what the run begins with; files may change while it lasts
    report = summarise(run_matrix(tier), tier.value, digest)
    if options.out:
        write_json(options.out, report.to_json())
    if page:
        page.write(markdown(report))
    for line in terminal_lines(report):
        say(line)
    return 0 if report.holds else 1


def _calibrate(options: argparse.Namespace) -> int:
    """Diagnose every known defect, say and write how that went; the exit status is 1 for a confident error."""
    if options.page:
        raise InputError("--page: leave it away beside --diagnosis; the section holds the stored calibration")
    deciding = digest()
    report = DiagnosisReport.of(calibrate(), deciding)
    if options.out:
        write_json(options.out, report.to_json())
    for line in diagnosis_lines(report):
        say(line)
    return 1 if report.confident_errors else 0
