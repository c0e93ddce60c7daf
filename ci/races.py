"""How soon repeats of one case find kernels that lose a race: with which probability, in how many seconds, as a table.

Usage: python ci/races.py [SECONDS] [cpu|cuda], by default 60 seconds for all, on a CPU; ``ci/bench`` keeps the output.
"""

import datetime
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from mla_conformance.backends.roles import Role, role_of
from mla_conformance.cases.case import Call, Case
from mla_conformance.defects.races import RACES, OrderOfAdditions, OrderOfSplits, StaleRow
from mla_conformance.engine.describe import device_facts, find_device
from mla_conformance.judging.traits import Repeated
from mla_conformance.traits.repeats import repeated
from mla_conformance.trials.context import Context
from mla_conformance.trials.subject import Subject

PROBABILITY = 0.95
_FEW = 100
"""Calls from which it is known how long one takes."""
_SMALL = {"dims": "small", "heads": 1}
_FIELDS = {
    Role.PREFILL: {"q": (5,), **_SMALL},
    Role.DECODE: {"call": Call.DECODE, "q": (1, 1), "kv": (40, 9), "page": 64, **_SMALL},
    Role.SPARSE: {"call": Call.SPARSE_DECODE, "q": (1,), "kv": (24,), "page": 64, "topk": 16, **_SMALL},
}
_SEVERAL_TILES = {
    OrderOfAdditions: {"q": (49,), **_SMALL},
    OrderOfSplits: {"call": Call.DECODE, "q": (1, 1), "kv": (300, 200), "page": 64, "dims": "small", "heads": 8},
}
"""Two have the same sum in either order."""


class RarestTile(StaleRow):
    """Once in 10,000 calls the first row is stored before it was computed."""

    one_in = 10_000


KERNELS = (*RACES, RarestTile)


def main(seconds: float, device: torch.device) -> None:
    """A row for each kernel: as many calls as find it with the probability, or the share of them that time allows."""
    torch.set_num_threads(1)
    needed = {kernel: math.ceil(math.log(1 - PROBABILITY) / math.log1p(-1 / kernel.one_in)) for kernel in KERNELS}
    whole = sum(calls * _repeated(kernel, _FEW, device).seconds / _FEW for kernel, calls in needed.items())
    where = device_facts(device)
    sys.stdout.write(
        f"{where['device']}, {os.cpu_count()} cores, torch {where['torch']}, python {where['python']}, "
        f"{datetime.datetime.now(datetime.UTC).date()}\n\n"
        "| kernel | differs once in | calls | seconds | found with | differing | first | which is |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    for kernel, calls in needed.items():
        found = _repeated(kernel, int(calls * min(1.0, seconds / whole)), device)
        sys.stdout.write(f"| {' | '.join(_cells(kernel, found))} |\n")
        sys.stdout.flush()


def _cells(kernel: Any, found: Repeated) -> Iterator[str]:
    yield kernel.__name__
    yield f"{kernel.one_in:,}"
    yield f"{found.calls:,}"
    yield f"{found.seconds:.1f}"
    yield f"{1 - (1 - 1 / kernel.one_in) ** found.calls:.3f}"
    yield str(found.differing)
    yield f"{found.first:,}" if found.differing else "–"
    yield "wrong" if found.wrong else "right, with other bits" if found.differing else "not found"


def _repeated(kernel: Any, calls: int, device: torch.device) -> Repeated:
    reference = f"{kernel.__module__}:{kernel.__name__}" if kernel in RACES else f"{__file__}:{kernel.__name__}"
    case = Case.of(capability="determinism", **_SEVERAL_TILES.get(kernel, _FIELDS[role_of(kernel)]))
    found = repeated(Subject.of(reference, device), Context(), case, calls)
    if found.failed:
        sys.exit(f"{kernel.__name__}: {case.id}: {found.failed}")
    return found


if __name__ == "__main__":
    told = sys.argv[1:]
    where = find_device(told[1] if told[1:] else "cpu")
    if where is None:
        sys.exit(f"expected a machine with CUDA, got one without, for {told[1]}")
    main(float(told[0]) if told else 60.0, where)
