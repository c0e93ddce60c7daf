"""Where operands lie: they end where memory ends and begin where it begins, or reach beyond 2^31 or 2^32 elements.

Nothing beside them may be touched. ``k31`` spreads the rows of k so that half of them lie beyond 2^31 elements from the
first; ``rows31`` puts the judged rows behind as many others. On a CPU what lies between is reserved and never touched.
"""

import math
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mla_conformance.backends.metadata import chunked_context_metadata, prefill_metadata
from mla_conformance.backends.roles import IndexSpace
from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import Step, call_once
from mla_conformance.judging.golden import Reach, rows_before
from mla_conformance.judging.record import Check
from mla_conformance.problems.cached_batch import int32
from mla_conformance.problems.calls import KernelCall, Problem
from mla_conformance.problems.fences import OUT, Buffers, Fence, MovedCall, Side, noted_faults, operands
from mla_conformance.problems.memory import Guarded, device_lost, poison, reserved
from mla_conformance.problems.operands import start_loc
from mla_conformance.problems.written import CacheImage, WrittenEntries
from mla_conformance.reference import chunking, selected
from mla_conformance.roles.prefill.problem import PrefillCall
from mla_conformance.trials.graph import cut, observed, prepared_call
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, Trial

_Place = Fence | Buffers
_BESIDE = {Side.END: "behind the end of", Side.BEGINNING: "before the beginning of"}


class OutOfBoundsError(Exception):
    """A call that touched what lies beside an operand."""


def call_moved(
    place: _Place, first: Step, backend: Any, call: KernelCall, out: Guarded | None, prepare: bool, device: torch.device
) -> Any:
    """As :func:`call_once`, over operands that lie elsewhere; a fault on a GPU loses the context, which is seen."""
    moved, fenced = MovedCall(place, call, out), isinstance(place, Fence)
    try:
        with noted_faults() if fenced else nullcontext():
            value = call_once(first, backend, moved.call, moved.out, prepare, device)
    finally:
        if not device_lost(device):
            moved.write_back()
            # What touched something may have raised because of what it found there.
            if fenced and (beyond := list(moved.settle())):
                raise OutOfBoundsError("; ".join(beyond))
    return moved.handed_back(value, out)


def memory_bounds(trial: Trial) -> None:
    expectation = trial.context.expect(trial.problem)
    for side in Side:
        seen = trial.run(trial.backend, trial.problem, perform=partial(call_moved, Fence(side)))
        if error := seen.error:
            kind, _, what = error.error.partition(": ")
            if kind == OutOfBoundsError.__name__:
                trial.fail(Check.OUT_OF_BOUNDS, f"{error.call.name}: {what}")
            if seen.device_lost:
                found = _named_apart(trial, side)
                what = f"touches what lies {_BESIDE[side]} {found}" if found else error.error
                trial.fail(Check.OUT_OF_BOUNDS, f"{error.call.name}: {what}")
        trial.judged(trial.problem, expectation, seen, f"with no memory {_BESIDE[side]} every operand")


def _named_apart(trial: Trial, side: Side) -> str:
    """The operand that is at fault when it is fenced alone, of which a process of its own dies; empty if none is."""
    told = (trial.subject.backend.reference, str(trial.subject.device), trial.case.id, trial.context.salt, side)
    command = [sys.executable, "-m", __name__, *told]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.splitlines()[-1] if done.returncode and done.stdout else ""


_ALIGNMENT = 64
_CACHES = ("kv_cache", "k", "extra_kv_cache")  # arguments of calls that read paged caches
_SCALE_BYTES = 4  # offsets of a scale count numbers of so many bytes beside codes of one


def far(trial: Trial) -> None:
    """Run with operands that are far apart, or run the far problem and judge the rows of its last request."""
    device = trial.subject.device
    try:
        near = trial.build(replace(trial.case, far="none"))
        expectation = trial.context.expect(near)
        if Reach.of(trial.case).operand != "rows":
            seen = trial.run(trial.backend, near, perform=partial(call_far, Reach.of(trial.case)))
        else:
            value = trial.call("far operands: the call", partial(_far_call, trial.backend, trial.case, near))
            seen = observed(near, value)
        trial.judged(near, expectation, seen, "far operands")
    finally:
        if device.type == "cuda" and not device_lost(device):
            torch.cuda.empty_cache()  # other processes judge on the same device


def call_far(
    reach: Reach, first: Step, backend: Any, call: KernelCall, out: Guarded | None, prepare: bool, device: torch.device
) -> Any:
    """As :func:`call_once`, over operands whose rows or blocks are far apart, made where it is called."""
    first()
    images, distant = dict[str, Any](), dict[str, Any]()
    if reach.operand != "cache":
        name = "logits" if "logits" in call.given else reach.operand  # logits are the queries of a top-k, and its keys
        rows: dict[str, Any] = {name: _spread(getattr(call, name), reach)}
        moved: KernelCall = call.given_otherwise(**rows) if call.given else replace(call, **rows)
    else:
        held = {name: x for name, x in {**call.given, **call.named}.items() if name in _CACHES and x is not None}
        there = {name: _spread(x, reach) for name, x in held.items() if x.dim() > 2}
        images = {name: x for name, x in call.written.items() if isinstance(x, CacheImage | WrittenEntries)}
        call.reset()
        nothing = torch.empty(0, dtype=torch.uint8)
        distant = {name: replace(x, cache=_spread(x.cache, reach), before=nothing) for name, x in images.items()}
        moved = replace(call.given_otherwise(**there), written={**call.written, **distant})
    moved.prepare(backend)
    value = moved.invoke(backend, out)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for name, image in images.items():
        image.cache.copy_(distant[name].cache)
    return value


def _far_call(backend: Any, case: Case, near: Problem) -> Any:
    behind = _behind_others if isinstance(near.calls[0], PrefillCall) else _lists_behind_others
    return cut(prepared_call(backend, behind(near, rows_before(case))), slice(-near.calls[0].q.shape[0], None))


def _spread(x: torch.Tensor, reach: Reach) -> torch.Tensor:
    """``x`` [rows, ...] in a buffer of twice the elements, the first half of the rows before them; each row packed."""
    elements = 2 * reach.elements * (_SCALE_BYTES if x.itemsize == 1 and not x.is_cuda else 1)
    # Whole rows of the last dimension too: a kernel may count in entries, such as those of 656 bytes.
    unit = math.lcm(_ALIGNMENT, x.shape[-1])
    stride = -(-elements // x.shape[0]) // unit * unit
    size = x.shape[0] * stride
    buffer = poison((size,), x.dtype, x.device) if x.is_cuda else reserved(size, x.dtype)
    return buffer.as_strided(x.shape, (stride, *torch.empty(x.shape[1:], device="meta").stride())).copy_(x)


def _behind_others(near: Problem, rows: int) -> Problem:
    """The request of ``near`` behind one of so many rows, which see one key."""
    call: Any = near.attention[0]
    q = _behind_ones(call.q, rows)
    k, v = (torch.cat([x[:1], x]) for x in (call.k, call.v))
    lengths = ((rows, call.q.shape[0]), (1, call.k.shape[0]))
    queries, keys = map(start_loc, lengths)
    chunk = chunking.ContextChunk((0, 0), lengths[1])
    width = call.metadata.chunked_context.workspace.shape[1]
    metadata = prefill_metadata(
        lengths[0],
        block_table=torch.zeros(2, 1, dtype=torch.int32, device=near.device),
        dtype=near.dtype,
        device=near.device,
        chunked_context=chunked_context_metadata([chunk], torch.empty(keys[-1], width), near.device),
    )
    big = replace(call, q=q, k=k, v=v, query_start_loc=queries, key_start_loc=keys, metadata=metadata)
    return replace(near, calls=(big,))


def _lists_behind_others(near: Problem, rows: int) -> Problem:
    call: Any = near.calls[0]
    assert call.case.space == IndexSpace.SLOT and call.topk_length is None
    query, keys = (_behind_ones(call.given[name], rows) for name in ("q", "kv"))
    others = torch.full((rows, call.topk_indices.shape[1]), selected.NO_KEY, dtype=torch.int32, device=near.device)
    others[:, 0] = torch.arange(rows)
    own = torch.where(call.topk_indices == selected.NO_KEY, selected.NO_KEY, call.topk_indices + rows)
    lengths = [rows, len(call.q)], [rows, int(call.metadata.seq_lens_cpu)]
    metadata = replace(
        call.metadata,
        query_start_loc=int32(start_loc(lengths[0]), near.device),
        req_id_per_token=int32([0, 1], near.device).repeat_interleave(torch.tensor(lengths[0], device=near.device)),
        seq_lens=int32(lengths[1], near.device),
        workspace_starts=torch.cat([int32([0], near.device), call.metadata.workspace_starts + rows]),
        max_query_len=max(lengths[0]),
        max_seq_len=max(lengths[1]),
        query_lens_cpu=int32(lengths[0], torch.device("cpu")),
        seq_lens_cpu=int32(lengths[1], torch.device("cpu")),
    )
    big = call.given_otherwise(q=query, kv=keys, topk_indices=torch.cat([others, own]))
    return replace(near, calls=(replace(big, metadata=metadata),))


def _behind_ones(x: torch.Tensor, rows: int) -> torch.Tensor:
    wide = torch.ones(rows + len(x), *x.shape[1:], dtype=x.dtype, device=x.device)
    wide[rows:] = x
    return wide


def main(told: Sequence[str]) -> None:
    reference, device, case, salt, side = told
    trial = Trial(Subject.of(reference, torch.device(device)), Case.parse(case), Context(salt))
    for name in dict.fromkeys(name for call in trial.problem.calls for name in (*operands(call), OUT)):
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        if trial.run(trial.backend, trial.problem, perform=partial(call_moved, Fence(Side(side), name))).error:
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
