"""Which CUDA kernels a backend launches: ``python ci/kernels.py OUTPUT.json NAME ...``, on a machine with a GPU.

One call of new tokens, or of a decode, under PyTorch's profiler; the names show whether the library's own kernel
served it.
"""

import json
import sys
from pathlib import Path

import torch

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import run_calls
from mla_conformance.driving.subject import Subject
from mla_conformance.problems.build import build_problem

_CASES = {
    Role.PREFILL: Case.of(capability="lse", q=(5, 130)),
    Role.DECODE: Case.of(capability="streams", call="decode", q=(1, 1), kv=(2000, 130), page=64, heads=16),
}


def kernels(name: str, device: torch.device) -> list[str]:
    """Names of the kernels of one call, after a first one that plans and compiles."""
    subject = Subject.of(name, device)
    if subject.unavailable:
        return []
    runnable = [case for case in _CASES.values() if not subject.missing_role(case)]
    if not runnable:
        return []
    problem = build_problem(runnable[0], device)
    backend, call = subject.create(problem.case), problem.calls[0]
    run_calls(backend, problem)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call.invoke(backend, None)
        torch.cuda.synchronize(device)
    return sorted({event.key for event in profile.key_averages()})


if __name__ == "__main__":
    device = torch.device("cuda", torch.cuda.current_device())
    found = {name: kernels(name, device) for name in sys.argv[2:]}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
