"""``export``: one call of a backend as a script that needs torch and the library alone, or a failure as an issue."""

import argparse
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from mla_conformance.backends import foreign, references
from mla_conformance.cases.case import Case
from mla_conformance.certificate.certificate import Certificate, read_certificate
from mla_conformance.certificate.records import KeptRecord, is_records, kept_records
from mla_conformance.commands import replay, reports
from mla_conformance.diagnosis.explain import Failure
from mla_conformance.engine.explainer import EXPLAINER
from mla_conformance.engine.machine import find_device, how_it_ends
from mla_conformance.export.failing import Reproduced, reproduced, require_one_call
from mla_conformance.export.inputs import NotWritable, TooLong
from mla_conformance.export.script import EXPORTED_BY, RIGHT, WRONG, run_alone, script_of, verdict_of
from mla_conformance.files.whole import InputError, read_text, require_writable, write_output
from mla_conformance.judging.record import CLAUSES, Check, Record, Status
from mla_conformance.report import ci_views, json_report
from mla_conformance.report.terminal import say
from mla_conformance.scoreboard.board import Entry, KnownFailure
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, judged_trial


def export(options: argparse.Namespace) -> int:
    if options.issue:
        return _write_issue(options)
    if not (options.case and options.backend and options.out):
        raise InputError("export: expected a case, --backend NAME and --out FILE.py, or --issue REPORT")
    case, path = Case.parse(replay.case_id(options.case)), options.out
    require_writable(path)
    if path.exists() and EXPORTED_BY not in read_text(path):
        raise InputError(f"{path}: exists, and export did not write it; name another file")
    draft = path.with_name(f".{path.stem}.{os.getpid()}.py")
    try:
        require_one_call(case)
        _require_survival(options, case)
        found = reproduced(_subject(options), case)
        found = replace(found, looks_like=_looks_like(found))
        text = foreign.call_foreign(lambda: script_of(found, path), passing=(NotWritable,))
        write_output(draft, text)
        ran = run_alone(draft)
        verdict = verdict_of(ran)
        if verdict != (WRONG if found.record.status is Status.FAIL else RIGHT):
            printed = " · ".join(ran.stdout.splitlines()[-5:])
            if not verdict:
                said = f"exit status {ran.returncode}, printed: {printed}"
                raise NotWritable(f"the script does not run without mla-conformance: {said}")
            said = f"the script says {verdict}, the judge: {found.record.message or 'pass'}; it printed: {printed}"
            raise NotWritable(f"a script of this one call does not give the judge's verdict: {said}")
        write_output(path, text)
    except TooLong as error:
        place = f"--backend {shlex.quote(options.backend)}" + (f" --device {options.device}" if options.device else "")
        given, out = shlex.quote(options.case), shlex.quote(str(options.out))
        smaller = f"mla-conformance minimize {given} {place} --out case.json"
        smaller += f" && mla-conformance export case.json {place} --out {out}"
        dumped = f"or hand over its tensors: mla-conformance replay {given} {place} --dump failure"
        raise InputError(f"export: {error}; a smaller case may fit: {smaller}; {dumped}") from error
    except (NotWritable, foreign.ForeignError, references.BackendReferenceError, subprocess.TimeoutExpired) as error:
        raise InputError(f"export: {error}") from error
    finally:
        draft.unlink(missing_ok=True)
    said = "fails" if found.record.status is Status.FAIL else "passes"
    say(f"wrote {path}, {len(text.splitlines())} lines; checked: without mla-conformance the call {said}, too")
    return 0


def _require_survival(options: argparse.Namespace, case: Case) -> None:
    def judged_elsewhere() -> None:
        torch.set_num_threads(1)  # threads of the process before do not exist in a fork
        reproduced(_subject(options), case)

    if ended := how_it_ends(judged_elsewhere):
        raise InputError(f"export: a process that judged {case.id} on {options.backend} ended: {ended}")


def _subject(options: argparse.Namespace) -> Subject:
    device = find_device(options.device or "")
    if device is None:
        raise InputError(f"export: this machine has no device {options.device}")
    sys.path.append(str(Path.cwd()))  # where a plug-in's module often is
    subject = Subject.of(options.backend, device)
    if subject.unavailable:
        raise InputError(f"export: expected a backend that runs here: {'; '.join(subject.unavailable)}")
    return subject


def _looks_like(found: Reproduced) -> str:
    """What a failure looks like, judged again: by now all is loaded, so that it is soon compared; empty if unlike."""
    trial, record = judged_trial(found.subject, found.case, Context())
    if record.check != found.record.check or not record.is_wrong_number:
        return ""
    said = EXPLAINER.explain(("", found.subject.backend.name), Failure.of(trial, record))
    explained = record.with_fields(explanation=said)
    return explained.looks_like if explained.is_explained or explained.finding else ""


def _write_issue(options: argparse.Namespace) -> int:
    if options.case or options.backend:
        raise InputError("export: --issue cannot be combined with a case or --backend; the report names both")
    if json_report.is_report(options.issue):
        issues = ci_views.issues_of(json_report.load_report(options.issue))
    else:
        path = json_report.report_file(options.issue)
        kept = kept_records(path) if is_records(path) else [KeptRecord(read_certificate(path))]
        entries = [Entry(each.certificate, "") for each in kept]
        issues = [_of_failure(failure, entry.record) for entry in entries for failure in entry.failures]
    issue = replay.chosen_failure(options.issue, issues, options.failure, "report or record", lambda x: x.title)
    if issue.example.status is Status.HARNESS_ERROR:
        said = "expected a kernel's failure, which its maintainers can mend"
        raise InputError(f"{options.issue}: failure {options.failure}: {said}, got: {issue.example.message}")
    reports.write_or_print(options.out, ci_views.issue_text(issue))
    return 0


def _of_failure(failure: KnownFailure, record: Certificate) -> ci_views.Issue:
    found = failure.example
    clause = CLAUSES[Check(found.check)] if found.check in set(Check) else ""
    example = Record(record.backend, record.reference, found.case.partition(":")[0], found.case, Status.FAIL)
    message = found.message.removesuffix(f" (SPEC {clause})")
    example = example.with_fields(message=message, check=found.check, clause=clause, salt=record.salt)
    further = tuple(each.case for each in failure.findings if each is not found)
    machine = {"device": record.device, **record.environment, "suite": record.suite}
    return ci_views.Issue(f"{record.backend}: {failure.reason}", record.distributions, machine, example, further)
