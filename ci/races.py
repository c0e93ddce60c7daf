"""How soon repeats of one case find kernels that lose a race: how often, with which probability, in how many seconds.

Usage: python ci/races.py [CALLS]
"""

import sys

import torch

from mla_conformance.backends.roles import Role, role_of
from mla_conformance.cases.case import Call, Case
from mla_conformance.defects.races import RACES
from mla_conformance.traits.repeats import repeated
from mla_conformance.trials.context import Context
from mla_conformance.trials.subject import Subject

_FIELDS = {
    Role.PREFILL: {"q": (33, 5), "dims": "small", "heads": 2},
    Role.DECODE: {"call": Call.DECODE, "q": (1, 1), "kv": (700, 300), "dims": "small", "heads": 4, "page": 64},
    Role.SPARSE: {
        "call": Call.SPARSE_DECODE, "q": (1,), "kv": (64,), "dims": "small", "heads": 2, "page": 64, "topk": 16,
    },
}  # fmt: skip


def main(calls: int) -> None:
    """One line for each."""
    torch.set_num_threads(1)
    for kernel in RACES:
        subject = Subject.of(f"{kernel.__module__}:{kernel.__name__}", torch.device("cpu"))
        case = Case.of(capability="determinism", **_FIELDS[role_of(kernel)])
        found = repeated(subject, Context(), case, calls)
        chance = 1 - (1 - 1 / kernel.one_in) ** found.calls
        said = f"{found.differing} of {found.calls} calls differ, the first is number {found.first}"
        if found.differing:
            needed = found.calls_for(0.95)
            said += f"; 95 % after {needed} calls, {needed * found.seconds / found.calls:.1f} s"
        kind = "wrong" if found.wrong else "right, other bits" if found.differing else "not found"
        expected = f"one in {kernel.one_in:>5}: expected with {chance:.3f}"
        sys.stdout.write(f"{kernel.__name__:<18} {expected}; {said}; {kind}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5000)
