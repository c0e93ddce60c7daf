"""Judges a layer on ranks that are processes, each with a device of its own: what ``layer_dcp`` runs in lockstep.

``torchrun --nproc-per-node 2 -m mla_conformance.distributed --backend EAGER`` runs the cases of so many ranks, through
NCCL where there are GPUs and through gloo elsewhere. Exit status: 0 all hold, 1 one failed, 2 usage, 3 nothing could be
judged; torchrun makes 1 of whatever is not 0.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from mla_conformance.backends.layer.context_parallel import DistributedGroup
from mla_conformance.backends.references import BackendReferenceError, parse_reference
from mla_conformance.cases.case import Case
from mla_conformance.engine.machine import device_facts, find_device
from mla_conformance.judging.record import Check, Status
from mla_conformance.problems import memory, operands
from mla_conformance.report.terminal import say
from mla_conformance.roles.layer.call import Layer, LayerCall
from mla_conformance.roles.layer.case import LayerCase
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, judge_one
from mla_conformance.vocabulary.capabilities import find_capability

_PASSED, _FAILED, _USAGE, _NOTHING = range(4)


class OwnRank:
    def __init__(self, backend: Any, case: LayerCase, dtype: torch.dtype, device: torch.device) -> None:
        self._group = DistributedGroup()
        self._layer = Layer(backend, case, dtype, device, self._group)

    def prepare(self, parts: Sequence[LayerCall]) -> None:
        parts[self._group.rank].prepare(self._layer)

    def forward(self, parts: Sequence[LayerCall]) -> list[Any]:
        """The result of every rank, and in every process what each of them wrote."""
        own = parts[self._group.rank].invoke(self._layer, None)
        for part in parts:
            torch.distributed.broadcast(memory.storage_bytes(part.image.cache), src=part.rank)
        return list(self._group.all_gather(own))

    def kernel_evidence(self) -> dict[str, str]:
        return self._layer.kernel_evidence()


class RankSubject(Subject):
    def create(self, case: Case) -> Any:
        assert isinstance(case, LayerCase)
        return OwnRank(self.class_of(case.role), case, operands.TORCH_DTYPES[case.dtype] or torch.bfloat16, self.device)


def judge_ranks(reference: str, device: torch.device) -> int:
    """Judge the cases of so many ranks; the exit status, and lines from the first, or from one that raised."""
    subject, counts = RankSubject(parse_reference(reference), device), Counter[Status]()
    facts, through = device_facts(device), torch.distributed.get_backend()
    context, world = Context(), torch.distributed.get_world_size()
    _say(f"{subject.backend.name} · {world} processes through {through} · {facts['device']} · torch {facts['torch']}")
    if subject.unavailable:
        _say(f"{subject.backend.name} unavailable: {'; '.join(subject.unavailable)}")
        return _NOTHING
    for case in find_capability("layer_dcp").cases:
        if not isinstance(case, LayerCase) or case.ranks != world:
            continue
        record = judge_one(subject, case, context)
        counts[record.status] += 1
        said = f"{record.status}: {case.id}: {record.message}"
        if record.status is Status.PASS:
            said = f"pass, {max(record.shares.values()):.2f} of budget: {case.id}"
        if record.check == Check.CALL:
            say(f"rank {torch.distributed.get_rank()}: {said}")
            return _FAILED
        _say(said)
    _say(", ".join(f"{number} {status}" for status, number in counts.items()) or f"no case has {world} ranks")
    judged = counts.total() - counts[Status.UNSUPPORTED] - counts[Status.UNAVAILABLE]
    return _NOTHING if not judged else _PASSED if counts[Status.PASS] == judged else _FAILED


def _say(line: str) -> None:
    if torch.distributed.get_rank() == 0:
        say(line)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("torchrun --nproc-per-node N -m mla_conformance.distributed", description=__doc__)
    parser.add_argument("--backend", required=True, metavar="NAME", help="a layer, or kernels for prefill and decode")
    options = parser.parse_args(arguments)
    if "LOCAL_RANK" not in os.environ:
        parser.error("expected to be one of the processes of torchrun, which names the ranks")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = find_device("cuda") or device
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=3))
    try:
        return judge_ranks(options.backend, device)
    except BackendReferenceError as error:
        _say(f"mla-conformance: {error}")
        return _USAGE
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
