"""A process that calls a backend on cases and judges nothing, for tools that watch it: ``python -m`` this module.

It writes lines of JSON into a file: what it is about to call and where, then a line for each case once it was called.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from mla_conformance.cases.case import Case
    from mla_conformance.trials.subject import Subject

NO_DEVICE = "torch sees no CUDA device"


class CallsBegin(Struct, frozen=True):
    environment: dict[str, str] = {}  # device and versions that the calls run with
    versions: dict[str, str] = {}  # of the distributions behind the backend
    unavailable: str = ""  # why nothing is called; empty where something is
    chosen: tuple[str, ...] = ()  # ids of the cases that are called, in this order
    unsupported: tuple[str, ...] = ()  # ids of those that are not, since the backend does not support them here


class CallEnded(Struct, frozen=True):
    """What became of a case: the seconds of its calls, compiling included, and what they raised, if they did."""

    case: str
    seconds: float
    raised: str = ""


def read_calls(path: Path) -> tuple[CallsBegin | None, tuple[CallEnded, ...]]:
    """What the process wrote before it ended, however it did."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    if not lines:
        return None, ()
    ended = tuple(msgspec.json.decode(line, type=CallEnded) for line in lines[1:])
    return msgspec.json.decode(lines[0], type=CallsBegin), ended


def main(told: Sequence[str]) -> None:
    """Make the calls of cases on a device, and write what became of them.

    Told is the backend, the device, the file, how many cases of each capability and role are called at most, 0 for all,
    and the ids of the cases.
    """
    import torch  # not for whoever only reads the lines

    from mla_conformance.backends.kernel import describe_device, get_device_capability
    from mla_conformance.cases.case import Case
    from mla_conformance.trials.subject import Subject, describe

    reference, device, path, most, *ids = told
    with Path(path).open("ab", buffering=0) as file:

        def tell(what: Struct) -> None:
            file.write(msgspec.json.encode(what) + b"\n")

        environment = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda or "")}
        if device == "cuda" and not torch.cuda.is_available():
            tell(CallsBegin(environment, unavailable=NO_DEVICE))
            return
        sys.path.append(str(Path.cwd()))
        subject = Subject.of(reference, torch.device(device))
        capability = get_device_capability(subject.device)
        environment["device"] = describe_device(subject.device)
        environment["compute_capability"] = str(capability) if capability else ""
        if subject.unavailable:
            tell(CallsBegin(environment, unavailable="; ".join(subject.unavailable)))
            return
        chosen, unsupported = _chosen(subject, [Case.parse(each) for each in ids], int(most))
        tell(
            CallsBegin(
                environment, describe(subject).versions, "", tuple(case.id for case in chosen), tuple(unsupported)
            )
        )
        for case in chosen:
            tell(_called(subject, case))


def _chosen(subject: "Subject", cases: Iterable["Case"], most: int) -> "tuple[list[Case], list[str]]":
    """The cases that are called, and the ids of those that are not supported here."""
    chosen, unsupported, taken = list["Case"](), list[str](), Counter[tuple[str, str]]()
    for case in cases:
        kind = case.capability, case.role
        if most and taken[kind] == most:
            continue
        if subject.unsupported(case):
            unsupported.append(case.id)
            continue
        taken[kind] += 1
        chosen.append(case)
    return chosen, unsupported


def _called(subject: "Subject", case: "Case") -> CallEnded:
    from mla_conformance.backends.foreign import one_line
    from mla_conformance.driving.driver import run_calls
    from mla_conformance.roles.table import build_problem

    began = time.perf_counter()
    try:
        error = run_calls(subject.create(case), build_problem(case, subject.device)).error
        raised = error.error if error else ""
    except Exception as failure:  # a constructor may raise, and a lost context makes no inputs
        raised = one_line(failure)
    return CallEnded(case.id, round(time.perf_counter() - began, 2), raised)


if __name__ == "__main__":
    main(sys.argv[1:])
