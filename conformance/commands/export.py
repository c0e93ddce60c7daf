"""``export``: one call of a backend as a script that anyone can run who has torch and the backend's library."""

import argparse
import os
import subprocess

from mla_conformance.backends.foreign import ForeignError, call_foreign
from mla_conformance.backends.references import BackendReferenceError
from mla_conformance.cases.case import Case
from mla_conformance.commands.replay import case_id
from mla_conformance.driving.subject import Subject
from mla_conformance.engine.describe import find_device
from mla_conformance.export.checked import Ran, run_alone
from mla_conformance.export.failing import Reproduced, reproduced, require_writable
from mla_conformance.export.literals import NotWritable
from mla_conformance.export.script import script_of
from mla_conformance.files.inputs import InputError
from mla_conformance.files.outputs import write_output
from mla_conformance.judging.verdict import Status
from mla_conformance.report.terminal import say


def export(options: argparse.Namespace) -> int:
    """Write a script, and run it; the exit status."""
    case, path = Case.parse(case_id(options.case)), options.out
    draft = path.with_name(f".{path.stem}.{os.getpid()}.py")
    try:
        require_writable(case)
        found = reproduced(_subject(options), case)
        text = call_foreign(lambda: script_of(found, path), passing=(NotWritable,))
        write_output(draft, text)
        _require_agreement(found, run_alone(draft))
        draft.replace(path)
    except (NotWritable, ForeignError, BackendReferenceError, subprocess.TimeoutExpired) as error:
        raise InputError(f"export: {error}") from error
    finally:
        draft.unlink(missing_ok=True)
    said = "fails" if found.verdict.status is Status.FAIL else "passes"
    say(f"{path}: {len(text.splitlines())} lines, {said} without mla-conformance as it does with it")
    return 0


def _subject(options: argparse.Namespace) -> Subject:
    device = find_device(options.device or "")
    if device is None:
        raise InputError(f"export: this machine has no device {options.device}")
    subject = Subject.of(options.backend, device)
    if subject.unavailable:
        raise InputError(f"export: what it calls can only be seen where it runs; {'; '.join(subject.unavailable)}")
    return subject


def _require_agreement(found: Reproduced, ran: Ran) -> None:
    """Refuse a script that does not find what the judge found."""
    wanted = int(found.verdict.status is Status.FAIL)
    if ran.status != wanted:
        judge = found.verdict.message or "pass"
        printed = " · ".join(ran.printed.splitlines()[-5:])
        said = f"the script ended with {ran.status}, the judge says: {judge}; it printed: {printed}"
        raise NotWritable(f"one call alone does not show it: {said}")
