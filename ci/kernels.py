"""Which CUDA kernels a backend launches: ``python ci/kernels.py OUTPUT.json NAME ...``, on a machine with a GPU.

One call of new tokens under PyTorch's profiler; the names show whether the library's own kernel served it.
"""

import json
import sys
from pathlib import Path

import torch

from mla_conformance.case import Case
from mla_conformance.driver import run_calls
from mla_conformance.problem import build_problem
from mla_conformance.subject import Subject


def kernels(name: str, device: torch.device) -> list[str]:
    """Names of the kernels of one call, after a first one that plans and compiles."""
    subject = Subject.of(name, device)
    if subject.unavailable:
        return []
    problem = build_problem(Case(capability="lse", q=(5, 130)), device)
    backend, call = subject.create(problem.case), problem.calls[0]
    run_calls(backend, problem)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        backend.run_prefill_new_tokens(call.q, call.k, call.v, return_softmax_lse=True)
        torch.cuda.synchronize(device)
    return sorted({event.key for event in profile.key_averages()})


if __name__ == "__main__":
    device = torch.device("cuda", torch.cuda.current_device())
    found = {name: kernels(name, device) for name in sys.argv[2:]}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
