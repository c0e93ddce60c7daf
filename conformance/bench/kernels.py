"""Throughput of the judged kernels beside a measured ceiling; information, never part of a verdict."""

from collections.abc import Iterator

import torch

from mla_conformance.backends.foreign import one_line
from mla_conformance.backends.references import known_backends, known_variants
from mla_conformance.bench.timing import Timing, timed
from mla_conformance.cases.case import Case
from mla_conformance.judging.needs import operations_of
from mla_conformance.roles.table import build_problem
from mla_conformance.trials.subject import Subject

_CASES = {
    "cpu": Case.of(capability="new_tokens", heads=4, q=(512,), layout="packed"),
    "cuda": Case.of(capability="new_tokens", heads=16, q=(16384,), layout="packed"),
}
_CEILING_SIZE = {"cpu": 1024, "cuda": 8192}


def throughput(device: torch.device) -> Iterator[str]:
    """A line for each backend that can run here: useful TFLOP/s and its share of what a matrix product reaches."""
    ceiling = _matrix_product(device)
    yield f"bf16 matrix product of {_CEILING_SIZE[device.type]}³ on this device: {ceiling / 1e12:.3g} TFLOP/s"
    case = _CASES[device.type]
    for backend in (*known_backends(), *known_variants()):
        subject = Subject(backend, device)
        if subject.unavailable:
            continue
        try:
            timing = _seconds(subject, case)
        except Exception as error:  # a kernel that fails here is judged elsewhere
            yield f"{subject.name:<20} {one_line(error)[:90]}"
            continue
        rate = operations_of(case) / timing.median
        yield f"{subject.name:<20} {timing}, {rate / 1e12:.3g} TFLOP/s, {rate / ceiling:.1%} of it, on {case.id}"


def _seconds(subject: Subject, case: Case) -> Timing:
    problem = build_problem(case, subject.device)
    backend, call = subject.create(case), problem.attention[0]
    call.prepare(backend)
    return timed(
        lambda: backend.run_prefill_new_tokens(call.q, call.k, call.v, return_softmax_lse=True), subject.device
    )


def _matrix_product(device: torch.device) -> float:
    """Operations per second of a large bf16 matrix product."""
    size = _CEILING_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2.0 * size**3 / timed(lambda: a @ b, device).median
