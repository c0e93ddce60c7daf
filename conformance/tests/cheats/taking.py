"""Golden values that somebody else computes, or that are looked for where they may be."""

import gc
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from threading import get_ident
from types import FrameType, ModuleType

import numpy as np
import torch

from mla_conformance.backends.loading import resolve_backend
from mla_conformance.backends.references import parse_reference
from mla_conformance.backends.roles import Role
from mla_conformance.judging.golden import GoldenAttention
from mla_conformance.reference.attention import attention
from mla_conformance.tests.cheats.cheat import WRONG, cheat

NUMBERS_ARE_RIGHT = (
    "The numbers are right, and a verdict is about nothing else. On a GPU the record lists the kernels that ran; "
    "whoever trusts the name reads the source that the certificate pins."
)


def _golden(attention, kernel, *qkv):
    """What the definition gives, in the dtypes that the contract asks for."""
    starts = {"query_start_loc": kernel.lengths, "key_start_loc": kernel.lengths}
    state = attention(*qkv, **starts, scale=kernel.scale, causal=True)
    return state.output.to(qkv[0].dtype), state.lse.float()


@cheat(trust=NUMBERS_ARE_RIGHT)
def CallsTheReference(kernel, output, lse, q, k, v):
    """Calls the golden reference and rounds its result."""
    return _golden(attention, kernel, q, k, v)


@cheat(trust=NUMBERS_ARE_RIGHT)
def CopiesTheReference(kernel, output, lse, q, k, v):
    """Executes a copy of the reference's source, under another name."""
    spec = find_spec("mla_conformance.reference.attention")
    assert spec is not None and spec.origin is not None
    copy = ModuleType("of_its_own")
    exec(compile(Path(spec.origin).read_text(encoding="utf-8"), "of_its_own", "exec"), vars(copy))
    return _golden(copy.attention, kernel, q, k, v)


@cheat(trust=NUMBERS_ARE_RIGHT)
def CallsAnotherBackend(kernel, output, lse, q, k, v):
    """Hands every call to the adapter of another library."""
    sizes = ("num_heads", "scale", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    found = resolve_backend(parse_reference("TORCH_SDPA"), None, Role.PREFILL)
    other = found(**{name: getattr(kernel, name) for name in sizes}, vllm_config=None)
    other.prepare_metadata(kernel._prefill_metadata)
    return other.run_prefill_new_tokens(q, k, v, True)


@cheat(trust=NUMBERS_ARE_RIGHT)
def WrapsSDPA(kernel, output, lse, q, k, v):
    """Calls torch's attention on each request."""
    for start, end in zip(kernel.lengths, kernel.lengths[1:], strict=False):
        heads = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        found = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=kernel.scale)
        output[start:end] = found.squeeze(0).transpose(0, 1)


@cheat(caught=WRONG)
def SearchesTheHeap(kernel, output, lse, q, k, v):
    """Searches everything that Python's garbage collector knows for float64 tensors like its output."""
    alike = (x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.float64)
    for found in alike:
        # The error terms have the same shape, and no negative element.
        if found.shape == output.shape and found.amin() < 0:
            return output.copy_(found), lse
    return output, lse


@cheat(caught=WRONG)
def SearchesTheFrames(kernel, output, lse, q, k, v):
    """Searches the variables of its callers for what is expected of it."""
    for frame in stack_of(get_ident()):
        for value in frame.f_locals.values():
            if isinstance(value, GoldenAttention):
                return output.copy_(value.calls[0].output), lse
    return output, lse


@cheat(caught=WRONG)
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
    stats = {int(path.name): _told(int(path.name), "stat") for path in Path("/proc").iterdir() if path.name.isdigit()}
    parents = {process: int(stat.rpartition(")")[2].split()[1]) for process, stat in stats.items() if stat}
    above = [os.getpid()]
    while parent := parents.get(above[-1], 0):
        above.append(parent)
    keeper = max(place for place, process in enumerate(above) if "engine.keeper" in _told(process, "cmdline"))
    family = [above[keeper + 1]]
    for process in family:  # which grows meanwhile
        family += [child for child, parent in parents.items() if parent == process]
    return [process for process in family if process != os.getpid()]


def _told(process: int, name: str) -> str:
    try:
        return Path(f"/proc/{process}/{name}").read_text(errors="replace")
    except OSError:  # it has ended
        return ""


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
