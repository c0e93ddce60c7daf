"""Timing one backend, in the process that has it, at shapes too large to be drawn: those of a small case, repeated."""

import ctypes
import gc
import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median
from timeit import Timer
from typing import Any

import torch
from msgspec.structs import replace as told
from torch.autograd import DeviceType
from torch.autograd.profiler import profile, record_function

from mla_conformance.backends.foreign import cut, one_line
from mla_conformance.backends.kernel import get_device_capability
from mla_conformance.backends.roles import IndexSpace
from mla_conformance.backends.slots import slots_at
from mla_conformance.cases.case import Call, Case
from mla_conformance.driving.driver import parts_of
from mla_conformance.problems.cached_batch import int32
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.memory import device_lost
from mla_conformance.problems.operands import TORCH_DTYPES, start_loc
from mla_conformance.roles.definition import DEFINITIONS, build_problem
from mla_conformance.roles.prefill.problem import assemble_metadata, one_chunk
from mla_conformance.roles.sparse.problem import SparseCall
from mla_conformance.speed.times import KINDS, SHAPES, Interval, Shape, Speed, Timed, sized
from mla_conformance.trials.subject import Subject, device_reasons

PATIENCE = {"cuda": 10.0, "cpu": 45.0}
"""Seconds after which no further shape of a kernel is begun."""
SLOWEST = {"cuda": 0.1, "cpu": 1.0}  # seconds of the slowest call that is timed, which takes a hundred of them
_LINE = 300  # characters of a reason
_PASSES, _ROUNDS = 2, 3
"""Each pass has inputs, memory and an instance of its own. Of six medians the least and the greatest have what they are
medians of between them in 97 of 100 cases."""
_WARM, _LONG = 2.0, 8.0  # milliseconds of a round, before and while it is timed; one call at least
_LEAST_CALLS, _MOST_CALLS = 3, 20  # of a round by the profiler, which takes as long for what it has seen
PLAIN = "called"
_FLUSHED = 2**28  # bytes, several times a GPU's L2
_COPIED, _SIDE = {"cuda": 2**30, "cpu": 2**26}, {"cuda": 8192, "cpu": 512}
_PAGES, _ROWS = 64, 64  # of a small case, which are repeated
_SAID = {
    "cuda": "median of 2 × 3 rounds, ± half their range (a 97 % interval), L2 flushed before each call; of plain calls "
    "what their kernels take, by CUPTI through torch's profiler, of CUDA graphs triton.testing.do_bench: whichever "
    "has the faster slowest round",
    "cpu": "on a CPU, at small shapes: median of 2 × 3 rounds of timeit, ± half their range (a 97 % "
    "interval); caches not flushed",
}


class Clocks:
    """What the driver's library tells of a GPU's clocks, read after each round."""

    def __init__(self, device: torch.device) -> None:
        self._seen, self._limits, self._handle = set[int](), 0, ctypes.c_void_p()
        self._why = "" if device.type == "cuda" else "clocks of a CPU are not read"
        try:
            if not self._why:
                nvml = ctypes.CDLL("libnvidia-ml.so.1")
                named = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
                if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(named, ctypes.byref(self._handle)):
                    self._why = "clocks not read: NVML does not know this device"
                self._clock, self._reasons = nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        except (OSError, AttributeError) as error:
            self._why = f"clocks not read: {error}"

    def look(self) -> None:
        megahertz, limits = ctypes.c_uint(), ctypes.c_ulonglong()
        if not self._why and not self._clock(self._handle, 1, ctypes.byref(megahertz)):  # 1: of the multiprocessors
            self._seen.add(megahertz.value)
        if not self._why and not self._reasons(self._handle, ctypes.byref(limits)):
            self._limits |= limits.value

    @property
    def words(self) -> str:
        if self._why or not self._seen:
            return self._why or "clocks not read: NVML tells none"
        limits = ", ".join(name for bit, name in enumerate(_LIMITS, start=1) if self._limits & 1 << bit)
        throttled = f"throttled by {limits}" if limits else "not throttled"
        return f"SM clock {min(self._seen):,} to {max(self._seen):,} MHz, {throttled}"


# NVML's reasons for clocks below the highest, from bit 1.
_LIMITS = (
    "application clocks", "power cap", "hardware slowdown", "sync boost", "thermal limit", "hardware thermal limit",
    "power brake",
)  # fmt: skip


class Rounds:
    """Microseconds of calls; each pass over the shapes adds its rounds to those before."""

    def __init__(self, device: torch.device, clocks: Clocks | None = None) -> None:
        self._device, self._clocks, self._found = device, clocks, defaultdict[str, list[float]](list)

    def take(self, what: str, call: Callable[[], object], by_the_clock: bool = False) -> Interval:
        """On a GPU what the kernels of plain calls take, or events around others; elsewhere, or if asked, the clock."""
        found = self._found[what]
        if what == PLAIN and self._device.type == "cuda":
            seen = kernel_times(call, self._device)
            each = len(seen) // _ROUNDS
            found += [median(seen[number * each : (number + 1) * each]) for number in range(_ROUNDS)]
            if self._clocks:
                self._clocks.look()
        elif self._device.type == "cuda" and not by_the_clock:
            from triton.testing import do_bench

            for _ in range(_ROUNDS):
                found.append(1e3 * median(map(float, do_bench(call, warmup=_WARM, rep=_LONG, return_mode="all"))))
                if self._clocks:
                    self._clocks.look()
        else:

            def clock() -> float:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                return time.perf_counter()

            timer = Timer(call, timer=clock)
            calls = max(1, int(_LONG / 1e3 / max(timer.timeit(1), 1e-7)))
            found += [1e6 * timer.timeit(calls) / calls for _ in range(_ROUNDS)]
        return Interval(*(round(each, 3) for each in (median(found), min(found), max(found))))


def kernel_times(call: Callable[[], object], device: torch.device) -> list[float]:
    """Microseconds of each of several calls in which its kernels run, whatever the host takes to launch them.

    A call shorter than its launches would otherwise be as long as these, which engines hide behind other work.
    """
    flushed = torch.empty(_FLUSHED, dtype=torch.uint8, device=device)
    began = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    each = int(_LONG / 1e3 / (time.perf_counter() - began))
    # Of :mod:`torch.profiler` the part that does not import torch's compiler first, which takes five seconds.
    with profile(use_device="cuda", use_kineto=True, acc_events=True) as seen:
        for _ in range(_ROUNDS * min(_MOST_CALLS, max(_LEAST_CALLS, each))):
            flushed.zero_()
            with record_function(PLAIN):
                call()
        torch.cuda.synchronize(device)
    of_gpu = [x for x in seen.function_events or () if x.device_type == DeviceType.CUDA]
    calls, kernels = (
        sorted((x.time_range.start, x.time_range.end) for x in of_gpu if (x.name == PLAIN) == is_call)
        for is_call in (True, False)
    )
    found = busy_in(calls, kernels)
    if len(found) < _ROUNDS or not all(found):
        seen_of = f"the profiler saw kernels of {sum(map(bool, found))} calls, expected those of all"
        raise RuntimeError(f"{seen_of}: CUPTI serves one profiler at a time")
    return found


def busy_in(spans: Sequence[tuple[float, float]], kernels: Sequence[tuple[float, float]]) -> list[float]:
    """For how long of each span some kernel runs that begins in it; both ascending, in the same unit."""
    found = list[float]()
    for first, last in spans:
        busy, behind = 0.0, first
        for start, end in kernels[bisect_left(kernels, (first,)) :]:
            if start > last:
                break
            busy, behind = busy + max(0.0, end - max(start, behind)), max(behind, end)
        found.append(busy)
    return found


def time_kernel(subject: Subject, forms: Sequence[str]) -> Speed:
    """The times of a backend that is imported after the card was measured, each in the first form that is supported."""
    device, kind = subject.device, subject.device.type
    gc.freeze()  # or each search for what a shape left would go through all that libraries hold, a fifth of a second
    try:
        copy, product = _card(device)
    except Exception as error:  # no timer, or no memory
        return Speed(why=cut(f"the device itself cannot be timed: {one_line(error)}", _LINE))
    clocks, ends, cases = Clocks(device), time.monotonic() + PATIENCE[kind], [Case.parse(form) for form in forms]
    times, rounds = dict[Shape, Timed](), dict[Shape, Rounds]()
    too_slow = dict[Call, float]()  # the least work of a call that is
    for shape in [shape for shape in SHAPES[kind] if any(form.call == shape.call for form in cases)] * _PASSES:
        found = times.get(shape, Timed(KINDS[shape.call], str(shape)))
        if shape in times and not found.called:
            continue
        try:
            case, reason = _supported(subject, shape, [form for form in cases if form.call == shape.call])
            if case and not found.called and time.monotonic() > ends:
                case, reason = None, f"skipped: the {PATIENCE[kind]:.0f} s for this kernel are over"
            elif case and not found.called and case.operations() >= too_slow.get(shape.call, math.inf):
                case, reason = None, f"skipped: a shape of no more work takes over {SLOWEST[kind]:g} s"
            if case:
                taker = rounds.setdefault(shape, Rounds(device, clocks))
                found = _timed(subject, case, told(found, case=case.id), (copy, product), taker)
                if not found.called:
                    too_slow[shape.call] = min(case.operations(), too_slow.get(shape.call, math.inf))
            else:
                found = told(found, why=cut(reason, _LINE))
        except Exception as error:
            found = told(found, called=None, graph=None, why=cut(one_line(error), _LINE))
        times[shape] = found
        if device_lost(device):
            return Speed(tuple(times.values()), _SAID[kind], copy, product, clocks.words, "the GPU's context was lost")
        if kind == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    return Speed(tuple(times.values()), _SAID[kind], copy, product, clocks.words)


def _supported(subject: Subject, shape: Shape, forms: Iterable[Case]) -> tuple[Case | None, str]:
    said = ""
    for form in forms:
        for case in sized(form, shape):
            dtype = TORCH_DTYPES[case.dtype] or torch.bfloat16
            kernel = subject.class_of(case.role)
            reasons = DEFINITIONS[case.role].reasons(kernel, case, dtype, get_device_capability(subject.device))
            if not reasons:
                return case, ""
            said = said or "; ".join(reasons)
    return None, said


def _timed(subject: Subject, case: Case, found: Timed, card: tuple[float, float], rounds: Rounds) -> Timed:
    device, on_gpu = subject.device, subject.device.type == "cuda"
    call, moved = call_of(case, device)
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device) if on_gpu else 0
    instance = subject.create(case)
    call.prepare(instance)

    def once() -> Any:
        return call.invoke(instance, None)

    results = parts_of(once())  # which compiles, and plans where that was not done
    size = sum(part.nbytes for part in results if isinstance(part, torch.Tensor))
    del results
    call.prepare(instance)
    began = time.perf_counter()
    once()
    if on_gpu:
        torch.cuda.synchronize(device)
        found = told(found, workspace=max(0, torch.cuda.max_memory_allocated(device) - held - size))
    if (seconds := time.perf_counter() - began) > SLOWEST[device.type]:
        why = f"a call takes {seconds:.1f} s; calls of up to {SLOWEST[device.type]:g} s are timed"
        return told(found, called=None, graph=None, why=why)
    found = told(found, called=rounds.take(PLAIN, once), moved=moved + size, operations=case.operations())
    as_graph = replace(case, capability="cuda_graph")
    is_captured = on_gpu and case.call != Call.SPARSE_PREFILL
    if is_captured and not device_reasons(as_graph, device, subject.class_of(case.role)):
        try:
            stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                once()
            torch.cuda.current_stream(device).wait_stream(stream)
            with torch.cuda.graph(graph):
                once()
            found = told(found, graph=rounds.take("graph", graph.replay))
            graph.reset()
        except Exception as error:
            found = told(found, why=cut(f"not captured: {one_line(error)}", _LINE))
    found = told(found, planning=rounds.take("planning", lambda: call.prepare(instance), by_the_clock=True))
    least = max(found.moved / card[0] / 1e3, found.operations / card[1] / 1e6)  # microseconds
    best = found.best
    return told(found, share=least / best.median) if best and best.median else found


def _card(device: torch.device) -> tuple[float, float]:
    """GB/s, read and written, of a copy, and TFLOP/s of a product of bf16 matrices, on a CPU of float32 ones."""
    size, side = _COPIED[device.type], _SIDE[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # which not every CPU multiplies otherwise
    factor, result = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

    def multiply() -> object:
        return torch.mm(factor, factor, out=result)

    Rounds(device).take("warm-up", multiply)  # from an idle GPU's clocks
    copied = Rounds(device).take("copy", lambda: target.copy_(source))
    multiplied = Rounds(device).take("product", multiply)
    return 2 * size / copied.median / 1e3, 2 * side**3 / multiplied.median / 1e6


def call_of(case: Any, device: torch.device) -> tuple[KernelCall, int]:
    """A call of a case's shape, and the bytes of its operands that are read once."""
    made = {Call.NEW_TOKENS: _prefill, Call.CONTEXT_CHUNK: _prefill, Call.SPARSE_PREFILL: _gathered}
    return made.get(case.call, _paged)(case, device)


def _prefill(case: Any, device: torch.device) -> tuple[KernelCall, int]:
    """Requests of one; what stands for a chunk of context is handed over whole."""
    rows, context = case.q[0], sum(case.kv)
    small_kv = {"kv": (min(context, _ROWS),)} if case.kv else {}
    small: Any = build_problem(replace(case, q=(min(rows, _ROWS),), **small_kv), device).calls[0]
    keys, chunks = (context, one_chunk(case.kv)) if case.kv else (rows, ())
    q, k, v = grown(small.q, rows), grown(small.k, keys), grown(small.v, keys)
    metadata = assemble_metadata(case, case.q, chunks, q.dtype, device)
    call = replace(small, q=q, k=k, v=v, metadata=metadata, query_start_loc=(0, rows), key_start_loc=(0, keys))
    return call, q.nbytes + k.nbytes + v.nbytes


def _paged(case: Any, device: torch.device) -> tuple[KernelCall, int]:
    """A decode: its own queries, its pages repeated and shuffled, and lists drawn anew where there are some."""
    new, requests = case.q[0], len(case.q)
    unit = 4 * case.extra_page if getattr(case, "has_extra", False) else 1  # whole pages of a second cache as well
    unit = math.lcm(unit, case.page)
    tokens = unit * max(1, _PAGES * case.page // unit // requests, -(-2 * new // unit))
    small: Any = build_problem(replace(case, kv=(tokens - new,) * requests), device).calls[0].handed()
    total = case.totals[0]
    own = small.metadata.block_table[:, : small.metadata.max_seq_len // case.page].flatten()
    cache, table = _pages(small.given["kv_cache"], own, requests, total, case.page)
    lengths, named = torch.full((requests,), total, dtype=torch.int32), dict(small.named)
    changed = {"block_table": table, "seq_lens": lengths.to(device), "seq_lens_cpu": lengths, "max_seq_len": total}
    moved = sum(x.nbytes for name, x in small.given.items() if name in ("ql_nope", "q_pe", "q"))
    if isinstance(small, SparseCall):
        ends = torch.arange(total - new + 1, total + 1, device=device).repeat(requests)
        lists = positions(ends, case.topk)
        moved += _read(lists, cache)
        numbers = lists if case.space == IndexSpace.POSITION else _slots(lists, table, case.page)
        named["topk_indices"] = numbers.int()
        if case.has_extra:
            earlier, length, page = named["extra_topk_indices"], case.extra_lens[0], case.extra_page
            own = (earlier[earlier >= 0] // page).unique()
            second, where = _pages(named["extra_kv_cache"], own, requests, length, page)
            lists = positions(torch.full_like(ends, length), case.extra_topk)
            named |= {"extra_kv_cache": second, "extra_topk_indices": _slots(lists, where, page).int()}
            moved += _read(lists, second)
        small = replace(small, case=case)
    else:
        moved += requests * total * cache[0, 0].nbytes
    big = {"given": {**small.given, "kv_cache": cache}, "named": named, "key_start_loc": start_loc((total,) * requests)}
    return replace(small, metadata=replace(small.metadata, **changed), **big), moved


def _gathered(case: Any, device: torch.device) -> tuple[KernelCall, int]:
    """A sparse prefill of one request: rows and gathered keys repeated, lists drawn anew."""
    few: Any = replace(case, q=(min(case.q[0], _ROWS),), kv=(_ROWS,))
    small: Any = build_problem(few, device).calls[0].handed()
    rows, keys = case.q[0], case.totals[0]
    first, held = int(small.metadata.workspace_starts[0]), small.metadata.max_seq_len
    stored = grown(small.given["kv"], keys, small.given["kv"][first : first + held])
    queries = grown(small.given["q"], rows)
    lists = positions(torch.arange(keys - rows + 1, keys + 1, device=device), case.topk)
    there = {"query_start_loc": [0, rows], "req_id_per_token": [0] * rows, "seq_lens": [keys], "workspace_starts": [0]}
    counts = {"query_lens_cpu": int32([rows], torch.device("cpu")), "seq_lens_cpu": int32([keys], torch.device("cpu"))}
    counts |= {name: int32(numbers, device) for name, numbers in there.items()}
    metadata = replace(small.metadata, max_query_len=rows, max_seq_len=keys, **counts)
    named, given = {**small.named, "topk_indices": lists.int()}, {**small.given, "q": queries, "kv": stored}
    call = replace(small, given=given, named=named, metadata=metadata, query_start_loc=(0, rows), case=case)
    return call, queries.nbytes + _read(lists, stored)


def _pages(
    cache: torch.Tensor, own: torch.Tensor, requests: int, total: int, page: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of so many tokens for each request, of the pages with these numbers, and its table without page 0."""
    each = -(-total // page)
    table = torch.randperm(requests * each, device=cache.device).add_(1).int().view(requests, each)
    return grown(cache, requests * each + 1, _bytes(cache)[own.long()].view(cache.dtype)), table


def grown(like: torch.Tensor, rows: int, source: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor with so many rows in the layout of another one, whose rows, or those of ``source``, are repeated."""
    source = like if source is None else source
    if like.stride(0) < max(like.stride()):
        like = like.contiguous()
    row = like.stride(0)
    offset = like.storage_offset() % row
    room = torch.empty(rows * row + offset, dtype=like.dtype, device=like.device)
    found = room.as_strided((rows, *like.shape[1:]), like.stride(), offset)
    for first in range(0, rows, len(source)):
        part = _bytes(found[first : first + len(source)])
        part.copy_(_bytes(source)[: len(part)])
    return found


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Codes as bytes, since they cannot be indexed everywhere."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _read(lists: torch.Tensor, cache: torch.Tensor) -> int:
    """Bytes of lists, as int32, and of the entries that they name; each entry that there is once at most."""
    return min(int((lists >= 0).sum()), cache.shape[0] * cache.shape[1]) * cache[0, 0].nbytes + 4 * lists.numel()


def _slots(lists: torch.Tensor, table: torch.Tensor, page: int) -> torch.Tensor:
    """Slots of the positions in lists [T, K], of as many rows of each request of a block table."""
    request = torch.arange(len(table), device=table.device).repeat_interleave(len(lists) // len(table))
    return torch.where(lists < 0, lists, slots_at(table, request.unsqueeze(1), lists.clamp(min=0), page))


def positions(seen: torch.Tensor, columns: int) -> torch.Tensor:
    """[T, columns] int64: for each row as many of its first ``seen`` keys, each once, as there is room for; then -1."""
    lists = torch.full((len(seen), columns), -1, dtype=torch.int64, device=seen.device)
    width = int(seen.max())
    kept = min(columns, width)
    for first in range(0, len(seen), _LISTS):
        bounds = seen[first : first + _LISTS, None]
        drawn = torch.rand(len(bounds), width, device=seen.device)
        drawn.masked_fill_(torch.arange(width, device=seen.device) >= bounds, 2.0)
        least = drawn.topk(kept, largest=False)
        lists[first : first + _LISTS, :kept] = least.indices.masked_fill(least.values > 1, -1)
    return lists


_LISTS = 512  # rows whose lists are drawn at once
