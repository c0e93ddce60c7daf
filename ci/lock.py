"""The verdict lock: every verdict on kernels that need no GPU, so that a refactoring is seen to change none.

``python ci/lock.py write FILE`` writes a row for each (case, kernel): EAGER, TORCH_SDPA and the honest kernels on the
full tier, each known defect on the capability that is expected to kill it, until a case does.
``python ci/lock.py compare BEFORE AFTER`` shows what differs. It exits with 0 if that is messages at most, and with 1
if it is a verdict, a number or a row. It exits with 2 if one of the files is no lock or has no rows, or if they were
not written on one machine with one torch and as many threads.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # read when torch is imported

import torch

from mla_conformance.backends.references import BackendReference
from mla_conformance.certificate.verify import installed_digests
from mla_conformance.defects.known import known_defects
from mla_conformance.defects.report import MatrixKernel, emulated
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import Status
from mla_conformance.report.differences import differing
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, judge_one
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier

Row = dict[str, Any]
_OF_A_MACHINE = ("cpu", "torch", "threads", "small")
_KEPT = ("case", "status", "check", "message", "where", "sampled", "finding")
_CPU = torch.device("cpu")


def rows_of(capability: str, small: bool) -> list[Row]:
    """The rows of one capability; the small part has its first case alone, and no honest kernel."""
    context, found = Context(), []
    cases = CAPABILITIES[capability].select(Tier.FULL)
    of_here = [MatrixKernel(name, name) for name in ("EAGER", "TORCH_SDPA")]
    of_here += [kernel for kernel in emulated() if kernel.killed_by or not small]
    asked = [kernel for kernel in of_here if kernel.killed_by in ("", capability)]
    subjects = {kernel.name: Subject(BackendReference(kernel.name, kernel.reference), _CPU) for kernel in asked}
    for case in islice(cases, 1 if small else None):
        records = [judge_one(subjects[kernel.name], case, context) for kernel in asked if case.role in kernel.roles]
        dead = {record.backend for record in records if record.failed}
        asked = [kernel for kernel in asked if not kernel.killed_by or kernel.name not in dead]
        if any(record.status not in (Status.UNSUPPORTED, Status.UNAVAILABLE) for record in records):
            problem = context.problem(case, _CPU)
            sums = {"problem": _checksum(problem.tensors()), "golden": _checksum(_tensors(context.expect(problem)))}
            found.append({"case": case.id, "kernel": "", **sums})
        for record in records:
            row = {name: getattr(record, name) for name in _KEPT} | {"kernel": record.backend}
            found.append({**row, "used": {rule: repr(share) for rule, share in record.shares.items()}})
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple) or is_dataclass(value):
        yield from chain.from_iterable(map(_tensors, value if isinstance(value, tuple) else vars(value).values()))


def _checksum(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().clone(memory_format=torch.contiguous_format)  # strides of one element, too
        digest.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.view(torch.uint8).numpy().data if plain.dim() else repr(plain.item()).encode())
    return digest.hexdigest()[:16]


def write(path: Path, small: bool, workers: int) -> int:
    """Write all rows, each capability's from a process of its own, so that none follows from what ran before."""
    torch.set_num_threads(1)
    known_defects()
    reported = Path("/proc/cpuinfo")
    lines = reported.read_text(encoding="utf-8").splitlines() if reported.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    cpu = f"{name}, {torch.backends.cpu.get_cpu_capability()}"
    here = {"cpu": cpu, "torch": torch.__version__, "threads": torch.get_num_threads(), "small": small}
    processes = multiprocessing.get_context("fork")
    with path.open("w", encoding="utf-8") as file, processes.Pool(workers, maxtasksperchild=1) as pool:
        file.write(json.dumps({**here, "digests": installed_digests()}) + "\n")
        for rows in pool.starmap(rows_of, [(name, small) for name in CAPABILITIES], chunksize=1):
            file.writelines(json.dumps(row, sort_keys=True) + "\n" for row in rows)
    return 0


def compare(before: Path, after: Path) -> int:
    """Say which rows differ, those whose message alone differs last; the exit status."""
    (old, was), (new, now) = read(before), read(after)
    machines = ({name: each.get(name) for name in _OF_A_MACHINE} for each in (old, new))
    if other := [f"{name}: {then!r} and {here!r}" for name, then, here in differing(*machines)]:
        sys.stderr.write(f"not compared: expected two locks of one machine, got {'; '.join(other)}\n")
        return 2
    known = {case for case, *_ in was}
    judged = {key: row for key, row in now.items() if key[0] in known}
    lines: dict[bool, list[str]] = {False: [], True: []}  # of rows that differ, by whether their message alone does
    for key, row, other_row in differing(was, judged):
        changed = list(differing(row or {}, other_row or {}))
        told = "; ".join(f"{name} {then!r} -> {here!r}" for name, then, here in changed)
        said = told if row and other_row else "is missing in one"
        lines[{name for name, *_ in changed} == {"message"}].append(f"{' '.join(key[:2])}: {said}")
    for line in [*lines[False], *lines[True]][:20]:
        sys.stdout.write(f"{line}\n")
    different, messages = len(lines[False]) + len(lines[True]), len(lines[True])
    added = f", {len(now) - len(judged)} of cases that were added" if len(now) > len(judged) else ""
    sys.stdout.write(f"{len(was)} rows, {different} different, {messages} of them in messages alone{added}\n")
    return 1 if lines[False] else 0


def read(path: Path) -> tuple[Row, dict[tuple[str, str, int], Row]]:
    """A lock's header, and its rows, of which there is at least one."""
    # By case, kernel, and which of the rows of both: two honest kernels may share a class's name.
    found: dict[tuple[str, str, int], Row] = {}
    seen = Counter[tuple[str, str]]()
    try:
        first, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        for row in rows:
            named = (row["case"], row["kernel"])
            found[*named, seen[named]] = row
            seen[named] += 1
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = f"expected a lock that ci/lock.py wrote, got {type(error).__name__}: {error}"
        raise InputError(f"{path}: {said}") from error
    if not found:
        raise InputError(f"{path}: expected rows behind the header, got none; write the lock again")
    return first, found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    writing = commands.add_parser("write")
    writing.add_argument("file", type=Path)
    writing.add_argument("--small", action="store_true", help="the first case of each capability, no honest kernel")
    writing.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "write":
        return write(options.file, options.small, options.workers)
    try:
        return compare(options.before, options.after)
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
