"""Golden values that somebody else computes, or that are looked for where they may be."""

import gc
import os
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from threading import get_ident
from types import FrameType

import numpy as np
import torch

from mla_conformance.backends.loading import resolve_backend
from mla_conformance.backends.references import parse_reference
from mla_conformance.backends.roles import Role
from mla_conformance.judging.golden import GoldenAttention
from mla_conformance.reference.attention import attention
from mla_conformance.tests.cheats.cheat import WRONG, cheat

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
