"""Numbers and verdicts that are not a kernel's own: found where they may be, recorded beforehand, or forged."""

import contextlib
import dis
import gc
import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from tempfile import gettempdir
from threading import get_ident
from types import CodeType, FrameType

import numpy as np
import torch

from mla_conformance.backends.loading import resolve_backend
from mla_conformance.backends.references import parse_reference
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.engine.folder import RUNS
from mla_conformance.engine.journal import JOURNAL_NAME
from mla_conformance.engine.messages import TaskReply, encode
from mla_conformance.judging.golden import GoldenAttention, golden_attention
from mla_conformance.judging.judge import AttentionJudge
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.reference.attention import attention
from mla_conformance.roles.table import build_problem
from mla_conformance.tests.cheats import CASE, EXPECTED, WRONG, cheat

_OWN = "that its own kernel computed"
NUMBERS_ARE_RIGHT = (
    "The numbers are right, and a verdict is about nothing else. On a GPU the record lists the kernels that ran; "
    "whoever trusts the name reads the source that the certificate pins."
)


@cheat(claims=_OWN, trust=NUMBERS_ARE_RIGHT)
def CallsTheReference(kernel, output, lse, q, k, v):
    """Calls the golden reference and rounds its result."""
    starts = {"query_start_loc": kernel.lengths, "key_start_loc": kernel.lengths}
    state = attention(q, k, v, **starts, scale=kernel.scale, causal=True)
    return state.output.to(q.dtype), state.lse.float()


@cheat(claims=_OWN, trust=NUMBERS_ARE_RIGHT)
def CallsAnotherBackend(kernel, output, lse, q, k, v):
    """Hands every call to the adapter of another library."""
    sizes = ("num_heads", "scale", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    found = resolve_backend(parse_reference("TORCH_SDPA"), None, Role.PREFILL)
    other = found(**{name: getattr(kernel, name) for name in sizes}, vllm_config=None)
    other.prepare_metadata(kernel._prefill_metadata)
    return other.run_prefill_new_tokens(q, k, v, True)


_COMPUTED = "that found numbers are computed"


@cheat(claims=_COMPUTED, caught=WRONG)
def SearchesTheHeap(kernel, output, lse, q, k, v):
    """Searches everything that Python's garbage collector knows for float64 tensors like its output."""
    alike = (x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.float64)
    for found in alike:
        # The error terms have the same shape, and no negative element.
        if found.shape == output.shape and found.amin() < 0:
            return output.copy_(found), lse
    return output, lse


@cheat(claims=_COMPUTED, caught=WRONG)
def SearchesTheFrames(kernel, output, lse, q, k, v):
    """Searches the variables of its callers for what is expected of it."""
    for frame in stack_of(get_ident()):
        for value in frame.f_locals.values():
            if isinstance(value, GoldenAttention):
                return output.copy_(value.calls[0].output), lse
    return output, lse


@cheat(claims=_COMPUTED, caught=WRONG)
def SearchesOtherProcesses(kernel, output, lse, q, k, v):
    """Reads the memory of the processes around it and looks there for golden values that begin as its own do."""
    begins = output[:2].double().div(3).flatten().numpy()
    for block in chain.from_iterable(map(_memory, relatives())):
        for place in _like(block, begins):
            found = block[place : place + output.numel()]
            if len(found) == output.numel() and np.abs(found).max() < 100:
                return output.copy_(torch.from_numpy(found.copy()).view(output.shape)), lse
    return output, lse


def stack_of(thread: int) -> Iterator[FrameType]:
    """The frames of a thread, innermost first."""
    frame = sys._current_frames().get(thread)
    while frame:
        yield frame
        frame = frame.f_back


def relatives() -> list[int]:
    """The processes of the run but this one: the supervisor first, then all that stem from it."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    above = [os.getpid()]
    while parent := parents.get(above[-1], 0):
        above.append(parent)
    keeper = max(place for place, process in enumerate(above) if b"engine.keeper" in _command(process))
    family = [above[keeper + 1]]
    for process in family:  # which grows meanwhile
        family += [child for child, parent in parents.items() if parent == process]
    return [process for process in family if process != os.getpid()]


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _memory(process: int) -> Iterator[np.ndarray]:
    """The writable memory of a process as float64, region by region; nothing where the system refuses it."""
    try:
        with Path(f"/proc/{process}/maps").open() as maps, Path(f"/proc/{process}/mem").open("rb", 0) as memory:
            for line in maps:
                start, _, end = line.split()[0].partition("-")
                if line.split()[1].startswith("rw") and (size := int(end, 16) - int(start, 16)) < 2**30:
                    try:
                        memory.seek(int(start, 16))
                        yield np.frombuffer(memory.read(size // 8 * 8), dtype=np.float64)
                    except (OSError, ValueError):
                        continue
    except OSError:
        return


def _like(block: np.ndarray, known: np.ndarray) -> list[int]:
    """Where values stand that differ from these by no more than 16-bit operands explain."""
    with np.errstate(all="ignore"):
        places = np.flatnonzero(np.abs(block - known[0]) < 0.01 * abs(known[0]))
        return [int(p) for p in places if np.allclose(block[p : p + len(known)], known, rtol=0.02, atol=0.02)]


@cache
def _recorded() -> dict[str, torch.Tensor]:
    """Golden outputs by fingerprint of the inputs; a file of them would do the same."""
    problem = build_problem(Case.parse(CASE), torch.device("cpu"))
    (call,), (golden,) = problem.attention, golden_attention(problem).calls
    return {_fingerprint(call.q, call.k, call.v): golden.output}


def _fingerprint(*inputs: torch.Tensor) -> str:
    return sha256(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in inputs)).hexdigest()


@cheat(claims="that recorded numbers are computed", caught="output is", salted=True)
def RemembersTheInputs(kernel, output, lse, q, k, v):
    """Knows the suite's inputs by a fingerprint, and the answers from a file."""
    return output.copy_(_recorded().get(_fingerprint(q, k, v), output)), lse


_HOLE = 2**28


@cheat(caught="exit status 0")
def LetsAChildAnswer(kernel, output, lse, q, k, v):
    """Forks; the child goes back to who called, and its parent waits for it and ends as a success."""
    if child := os.fork():
        os.waitpid(child, 0)
        os._exit(0)
    return output, lse


@cheat(caught="malformed reply")
def ForgesTheAnswer(kernel, output, lse, q, k, v):
    """Writes the record of a pass into every socket of its process, and ends that."""
    reference = f"{type(kernel).__module__}:{type(kernel).__name__}"
    record = Record(type(kernel).__name__, reference, CASE.partition(":")[0], CASE, Status.PASS)
    for link in Path("/proc/self/fd").iterdir():
        if link.is_socket():
            os.write(int(link.name), encode(TaskReply(record, leaves=True)))
    os._exit(0)


@cheat(caught=WRONG)
def ForgesTheJournal(kernel, output, lse, q, k, v):
    """Leaves a process behind that writes a pass behind each of its verdicts in the run's journal."""
    journal = journal_of(type(kernel).__name__)
    if not os.fork():
        if not os.fork():
            _forge(journal, f"{type(kernel).__module__}:{type(kernel).__name__}")
        os._exit(0)
    os.wait()
    return output, lse


def _forge(journal: Path, reference: str) -> None:
    """Until it is ended. A hole in the file, which takes long to read, gives it time to be there before the reader."""
    size = journal.stat().st_size
    os.truncate(journal, size + _HOLE)
    with journal.open("ab", 0) as forged, journal.open("rb") as file:
        forged.write(b"\n")
        file.seek(size + _HOLE)
        while True:
            event = _event(file.readline())
            if event.get("event") == "verdict" and event["record"]["reference"] == reference:
                event["record"].update(status="pass", message="", check="", clause="", confirmation="")
                forged.write(json.dumps(event).encode() + b"\n")


def _event(line: bytes) -> dict:
    try:
        return json.loads(line)
    except ValueError:
        return {}


def journal_of(name: str) -> Path:
    """The journal of the run that judges a backend of this name; it stands where runs stand, or in a temporary one."""
    folders = chain(Path(RUNS).iterdir() if RUNS.exists() else (), Path(gettempdir()).glob("*/run"))
    journals = (folder / JOURNAL_NAME for folder in folders)
    return next(path for path in journals if path.exists() and name in path.read_text(errors="replace"))


@cheat(caught=WRONG)
def WritesAnExpectation(kernel, output, lse, q, k, v):
    """Writes its own failure into the folder of known failures that the run was given."""
    journal = journal_of(type(kernel).__name__)
    entry = f'[[expectation]]\nbackend = "{type(kernel).__name__}"\ncase = "new_tokens"\nreason = "known"\n'
    (journal.parent.with_name(EXPECTED) / "known.toml").write_text(entry)
    return output, lse


@cheat(caught=WRONG)
def WritesIntoTheJudgesMemory(kernel, output, lse, q, k, v):
    """Writes other code over the judge's in the memory of every process of the run."""
    code = AttentionJudge._output.__code__
    steps = (("RESUME", 0), ("LOAD_CONST", code.co_consts.index(None)), ("RETURN_VALUE", 0))
    for process in (*relatives(), os.getpid()):
        # Forked of one process, they all have it at the same address.
        with contextlib.suppress(OSError), Path(f"/proc/{process}/mem").open("r+b", 0) as memory:
            memory.seek(id(code) + CodeType.__basicsize__)
            memory.write(b"".join(bytes((dis.opmap[name], argument)) for name, argument in steps))
    return output, lse
