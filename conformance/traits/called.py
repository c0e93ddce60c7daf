"""A process that calls a backend on one case and judges nothing, for tools that watch it: ``python -m`` this module."""

import sys
from collections.abc import Sequence
from pathlib import Path

NO_DEVICE, UNSUPPORTED = 77, 78
"""Exit statuses: there is no such device, the backend does not support the case here."""


def main(told: Sequence[str]) -> int:
    """Make the calls of a case on a device, and say so in a file; the exit status."""
    import torch  # not for whoever asks what the statuses are

    from mla_conformance.cases.case import Case
    from mla_conformance.driving.driver import run_calls
    from mla_conformance.files.places import search_current_folder
    from mla_conformance.roles.table import build_problem
    from mla_conformance.trials.subject import Subject

    reference, case_id, device, marker = told
    if device == "cuda" and not torch.cuda.is_available():
        return NO_DEVICE
    search_current_folder()
    subject, case = Subject.of(reference, torch.device(device)), Case.parse(case_id)
    if subject.unavailable or subject.unsupported(case):
        return UNSUPPORTED
    seen = run_calls(subject.create(case), build_problem(case, subject.device))
    Path(marker).write_text(seen.error.error if seen.error else "", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
