"""Time and workspace of the golden pass beside the definition and other projects' references, on the same inputs.

The workspace is the most that is allocated at a time beside operands and results. On a CPU each measurement has a
process of its own, so that peaks are its own; a GPU's are counted by its allocator.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from mla_conformance.bench.timing import REPETITIONS, timed
from mla_conformance.tests.bench.formulas import (
    FORMULAS,
    SPARSE_FORMULAS,
    Operands,
    Shape,
    SparseOperands,
    SparseShape,
    golden,
)

_SHAPES = {
    "cpu": (Shape(16, 512, 512), Shape(16, 1024, 2048)),
    "cuda": (Shape(16, 8192, 8192), Shape(16, 32768, 32768), Shape(128, 8192, 8192)),
}
_SCALES = {
    "cpu": [Shape(heads, keys, keys) for heads in (16, 128) for keys in (256, 1024)],
    "cuda": [
        Shape(heads, min(keys, 2**15), keys) for heads in (16, 128) for keys in (2**10, 2**13, 2**15, 2**17, 2**20)
    ],
}
_SPARSE = {"cpu": SparseShape(128, 64, 1024), "cuda": SparseShape(128, 4096, 4096)}
_WHOLE_OPERATIONS = {"cpu": 1e11, "cuda": 2e13}
_ROWS = 512

Figures = dict[str, float | str]


def compare(device: str) -> Iterator[str]:
    """Lines that compare the formulas, shape by shape."""
    for shape in _SHAPES[device]:
        yield from _beside(device, shape, FORMULAS)


def sparse(device: str) -> Iterator[str]:
    """Lines that compare the golden pass over selected keys with the definition over all of them, masked."""
    return _beside(device, _SPARSE[device], SPARSE_FORMULAS)


def scale(device: str) -> Iterator[str]:
    """A table of the golden pass over contexts and heads; rows are chosen where all are too much."""
    yield "heads    keys   rows       time   workspace   useful TFLOP/s"
    for shape in _SCALES[device]:
        measured = _process(device, "scale", shape)
        rows = min(shape.queries, int(measured.get("rows", shape.queries)))
        line = f"{shape.heads:>5} {shape.keys:>7} {rows:>6}"
        if "error" in measured:
            yield f"{line}   {measured['error']}"
        else:
            yield f"{line} {measured['seconds']:>8.4f} s {measured['megabytes']:>8.0f} MB {measured['tflops']:>8.2f}"


def _beside(device: str, shape: Shape, names: Iterable[str]) -> Iterator[str]:
    """Lines that compare the first formula, the golden pass, with the second, and all others with the first."""
    found = {name: _process(device, name, shape) for name in names}
    first, second, *_ = found
    yield f"{shape}:"
    for name, measured in found.items():
        other = second if name == first else first
        yield f"  {name:<8} {_text(measured, found[other], other)}"


def _text(measured: Figures, other: Figures, name: str) -> str:
    """What was measured, and the ratio to another of this name."""
    if "error" in measured:
        return str(measured["error"])
    text = f"{measured['timing']}, {measured['megabytes']:.0f} MB, {measured['tflops']:.3g} useful TFLOP/s"
    if "error" in other:
        return text
    return f"{text}; {float(measured['seconds']) / float(other['seconds']):.2f} × the time of {name}"


def _process(device: str, name: str, shape: Shape) -> Figures:
    if device == "cuda":
        torch.cuda.empty_cache()
        return _measure(torch.device("cuda", torch.cuda.current_device()), name, shape)
    command = [sys.executable, "-m", "mla_conformance.tests.bench.golden", device, name]
    command += map(str, (shape.heads, shape.queries, shape.keys))
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        return {"error": (finished.stderr.strip().splitlines() or ["ended without a word"])[-1][:100]}
    measured: Figures = json.loads(finished.stdout)
    return measured


def _measure(device: torch.device, name: str, shape: Shape) -> Figures:
    rows, operations = None, shape.operations
    if name == "scale" and operations > _WHOLE_OPERATIONS[device.type]:
        rows = [number * shape.queries // _ROWS for number in range(_ROWS)]
        operations *= _ROWS / shape.queries
    try:
        work = _work(device, name, shape, rows)
        before = _peak(device, reset=True)
        workspace = _workspace(device, before, work)
        timing = timed(work, device, 3 if name == "scale" else REPETITIONS)
    except torch.cuda.OutOfMemoryError:
        return {"error": "out of memory"}
    return {
        "seconds": timing.median,
        "timing": str(timing),
        "megabytes": workspace,
        "tflops": operations / timing.median / 1e12,
        "rows": len(rows) if rows else shape.queries,
    }


def _work(device: torch.device, name: str, shape: Shape, rows: list[int] | None) -> Callable[[], object]:
    """A formula on operands that are drawn here."""
    if isinstance(shape, SparseShape):
        selection = SparseOperands.of(shape, device)
        return lambda: SPARSE_FORMULAS[name](selection)
    operands = Operands.of(shape, device)
    return (lambda: golden(operands, rows)) if name == "scale" else (lambda: FORMULAS[name](operands))


def _workspace(device: torch.device, before: float, work: Callable[[], object]) -> float:
    """Megabytes that a first run takes beside its results."""
    result = work()
    return _peak(device) - before - sum(x.numel() * x.element_size() for x in _tensors(result)) / 1e6


def _tensors(result: object) -> Iterator[torch.Tensor]:
    """The tensors of a tuple, or of a value object and those in it."""
    if isinstance(result, torch.Tensor):
        yield result
    elif result is not None:
        for part in result if isinstance(result, tuple) else vars(result).values():
            yield from _tensors(part)


def _peak(device: torch.device, reset: bool = False) -> float:
    """Megabytes: the most that was allocated on a GPU since the reset, the largest resident size of this process."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device) / 1e6


def _main(arguments: Sequence[str]) -> None:
    device, name, *numbers = arguments
    kind = SparseShape if name in SPARSE_FORMULAS else Shape
    sys.stdout.write(json.dumps(_measure(torch.device(device), name, kind(*map(int, numbers)))))


if __name__ == "__main__":
    _main(sys.argv[1:])
