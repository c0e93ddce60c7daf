"""The project's own wrong kernels tried on a case: as judged as any backend's, at less cost, and on one thread.

What a step of a backend leaves changed in the process is looked for after each. These kernels are known, so that one
look after all steps will do; where it finds something, the kernel is tried again as any backend is.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mla_conformance.backends.foreign import one_line
from mla_conformance.backends.references import BackendReference
from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import Executor, StepResult, run_step
from mla_conformance.judging.record import Record
from mla_conformance.problems.memory import out_of_memory
from mla_conformance.trials.judge_one import judged_trial
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, Trial


class _Unwatched(Executor):
    """Carries out steps in this process while somebody else looks at what they leave."""

    def call(self, step: Callable[[], Any], reached: Iterable[torch.Tensor] = ()) -> StepResult:
        done = self.query(step)
        return replace(done, kept=done.value)

    def query(self, question: Callable[[], Any], kind: Any = None) -> StepResult:
        try:
            return StepResult(question())
        except Exception as error:
            return StepResult(error=one_line(error), out_of_memory=out_of_memory(error))


_UNWATCHED = _Unwatched()


def attempted(reference: str, case: Case, context: Context, device: torch.device) -> tuple[Trial, Record]:
    """The trial and the record of one of the project's own kernels.

    Raises:
        RuntimeError: it lost the GPU, after which nothing can be compared here.
    """
    backend = BackendReference(reference.rpartition(":")[2], reference)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # they wait for each other over small tensors, on a busy machine longer than one computes
    try:
        done = run_step(partial(judged_trial, Subject(backend, device, _UNWATCHED), case, context))
        if done.error or done.disturbed:
            return judged_trial(Subject(backend, device), case, context)
    finally:
        torch.set_num_threads(before)
    tried: tuple[Trial, Record] = done.value
    if tried[1].failed and _UNWATCHED.lost(device):
        raise RuntimeError(f"{reference} lost the GPU on {case.id}, so that nothing more can be compared there")
    return tried
