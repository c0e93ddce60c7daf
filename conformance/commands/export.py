"""``export``: one call of a backend as a script that anyone can run who has torch and the backend's library."""

import argparse
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import torch

from mla_conformance.backends.foreign import ForeignError, call_foreign
from mla_conformance.backends.references import BackendReferenceError
from mla_conformance.cases.case import Case
from mla_conformance.commands.issue import write_issue
from mla_conformance.commands.replay import case_id
from mla_conformance.diagnosis.explain import Failure
from mla_conformance.engine.describe import find_device
from mla_conformance.engine.explainer import EXPLAINER
from mla_conformance.engine.limits import how_it_ends
from mla_conformance.export.failing import Reproduced, reproduced, require_one_call
from mla_conformance.export.program import NotWritable, TooLong
from mla_conformance.export.script import EXPORTED_BY, RIGHT, WRONG, Ran, run_alone, script_of
from mla_conformance.files.inputs import InputError, read_text
from mla_conformance.files.outputs import require_writable, write_output
from mla_conformance.files.places import search_current_folder
from mla_conformance.judging.verdict import Status
from mla_conformance.report.terminal import say
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judged_trial
from mla_conformance.trials.subject import Subject


def export(options: argparse.Namespace) -> int:
    """Write a script, and run it, or the text of an issue; the exit status."""
    if options.issue:
        return write_issue(options)
    if not (options.case and options.backend and options.out):
        raise InputError("export: expected a case, --backend NAME and --out FILE.py, or --issue REPORT")
    case, path = Case.parse(case_id(options.case)), options.out
    require_writable(path)
    _require_ours(path)
    draft = path.with_name(f".{path.stem}.{os.getpid()}.py")
    try:
        require_one_call(case)
        _require_survival(options, case)
        found = reproduced(_subject(options), case)
        found = replace(found, looks_like=_looks_like(found))
        text = call_foreign(lambda: script_of(found, path), passing=(NotWritable,))
        write_output(draft, text)
        _require_agreement(found, run_alone(draft))
        write_output(path, text)
    except TooLong as error:
        raise InputError(f"export: {error}; {_further(options)}") from error
    except (NotWritable, ForeignError, BackendReferenceError, subprocess.TimeoutExpired) as error:
        raise InputError(f"export: {error}") from error
    finally:
        draft.unlink(missing_ok=True)
    said = "fails" if found.record.status is Status.FAIL else "passes"
    say(f"wrote {path}, {len(text.splitlines())} lines; checked: without mla-conformance the call {said}, too")
    return 0


def _require_survival(options: argparse.Namespace, case: Case) -> None:
    """Refuse a kernel that takes this process with it, as another one finds out."""

    def judged_elsewhere() -> None:
        torch.set_num_threads(1)  # threads of the process before do not exist in a fork
        reproduced(_subject(options), case)

    if ended := how_it_ends(judged_elsewhere):
        raise InputError(f"export: a process that judged {case.id} on {options.backend} ended: {ended}")


def _require_ours(path: Path) -> None:
    """Refuse to write over what this command did not write."""
    if path.exists() and EXPORTED_BY not in read_text(path):
        raise InputError(f"{path}: exists, and export did not write it; name another file")


def _subject(options: argparse.Namespace) -> Subject:
    device = find_device(options.device or "")
    if device is None:
        raise InputError(f"export: this machine has no device {options.device}")
    search_current_folder()
    subject = Subject.of(options.backend, device)
    if subject.unavailable:
        raise InputError(f"export: expected a backend that runs here: {'; '.join(subject.unavailable)}")
    return subject


def _looks_like(found: Reproduced) -> str:
    """What a failure looks like, judged again: by now all is loaded, so that it is soon compared; empty if unlike."""
    trial, record = judged_trial(found.subject, found.case, Context())
    if record.check != found.record.check or not record.is_wrong_number:
        return ""
    explained = record.with_fields(explanation=EXPLAINER.explain(("", found.subject.name), Failure.of(trial, record)))
    return explained.looks_like if explained.is_explained or explained.finding else ""


def _further(options: argparse.Namespace) -> str:
    """What to do with a case that is too large for a script."""
    place = f"--backend {shlex.quote(options.backend)}" + (f" --device {options.device}" if options.device else "")
    case, out = shlex.quote(options.case), shlex.quote(str(options.out))
    return (
        f"a smaller case may fit: mla-conformance minimize {case} {place} --out case.json && "
        f"mla-conformance export case.json {place} --out {out}; or hand over its tensors: "
        f"mla-conformance replay {case} {place} --dump failure"
    )


def _require_agreement(found: Reproduced, ran: Ran) -> None:
    """Refuse a script that does not find what the judge found."""
    if ran.verdict == (WRONG if found.record.status is Status.FAIL else RIGHT):
        return
    printed = " · ".join(ran.printed.splitlines()[-5:])
    if not ran.verdict:
        raise NotWritable(
            f"the script does not run without mla-conformance: exit status {ran.status}, printed: {printed}"
        )
    judge = found.record.message or "pass"
    said = f"the script says {ran.verdict}, the judge: {judge}; it printed: {printed}"
    raise NotWritable(f"a script of this one call does not give the judge's verdict: {said}")
