"""The judge, what it judges by and what it writes, replaced."""

import gc
import sys
import time
from threading import Thread, get_ident

import msgspec
import torch

from mla_conformance.engine import messages, worker
from mla_conformance.judging import judge
from mla_conformance.judging.golden import GoldenAttention
from mla_conformance.judging.record import Record
from mla_conformance.judging.tolerance import tolerance
from mla_conformance.judging.verdict import Status, Verdict
from mla_conformance.roles import table
from mla_conformance.tests.cheats.cheat import WRONG, ThreeTimes, cheat
from mla_conformance.tests.cheats.searching import stack_of
from mla_conformance.trials import trial


@cheat(caught=WRONG)
class ReplacesTheJudge(ThreeTimes):
    """Puts a judge that passes everything in the judge's place, wherever that was imported."""

    def answer(self, output, lse, q, k, v):
        table.judge = trial.judge = lambda *_: Verdict(Status.PASS)
        return output, lse


@cheat(caught=WRONG)
class RewritesTheJudge(ThreeTimes):
    """Leaves the judge's functions in their places and gives one of them other code."""

    def answer(self, output, lse, q, k, v):
        judge.AttentionJudge._output.__code__ = (lambda self, part, found: None).__code__
        return output, lse


@cheat(caught=WRONG)
class ReplacesTheJudgeLater(ThreeTimes):
    """Leaves a thread behind that replaces the judge when what the call left behind has been looked at."""

    def answer(self, output, lse, q, k, v):
        caller = get_ident()

        def replace_when_judged() -> None:
            while all(frame.f_code is not trial.Trial.judged.__code__ for frame in stack_of(caller)):
                time.sleep(0)
            judge.AttentionJudge._output = lambda *_: None  # type: ignore[method-assign]

        sys.setswitchinterval(1e-6)
        Thread(target=replace_when_judged, daemon=True).start()
        return output, lse


@cheat(caught=WRONG)
class ReplacesTheRecord(ThreeTimes):
    """Makes records that hold a pass, whatever the verdict is."""

    def answer(self, output, lse, q, k, v):
        honest = Record.with_verdict
        Record.with_verdict = lambda record, verdict, seconds: honest(record, Verdict(Status.PASS), seconds)
        return output, lse


@cheat(caught=WRONG)
class ReplacesTheMessages(ThreeTimes):
    """Lets its process report a pass, whatever the record holds."""

    def answer(self, output, lse, q, k, v):
        def passing(message):
            if isinstance(message, messages.TaskReply) and message.record:
                passed = message.record.with_fields(status=Status.PASS, message="", check="", clause="")
                message = msgspec.structs.replace(message, record=passed)
            return honest(message)

        honest, worker.encode = messages.encode, passing
        return output, lse


@cheat(caught=WRONG)
class ReplacesOperators(ThreeTimes):
    """Makes every difference and every comparison of tensors find that they agree."""

    def answer(self, output, lse, q, k, v):
        torch.equal = torch.allclose = lambda *_, **__: True
        torch.Tensor.__sub__ = lambda x, y: torch.zeros(torch.broadcast_shapes(x.shape, y.shape), dtype=x.dtype)
        return output, lse


@cheat(caught=WRONG)
class WidensTheTolerance(ThreeTimes):
    """Writes larger limits into the table of tolerances that is in memory."""

    def answer(self, output, lse, q, k, v):
        for limit in ("element_limit", "row_deviations"):
            object.__setattr__(tolerance(), limit, 1e9)
        return output, lse


@cheat(caught=WRONG)
class ReplacesTheGoldenResult(ThreeTimes):
    """Writes its own output over the golden one."""

    def answer(self, output, lse, q, k, v):
        for expectation in [x for x in gc.get_objects() if isinstance(x, GoldenAttention)]:
            expectation.calls[0].output.copy_(output)
        return output, lse


@cheat(caught=WRONG)
class ChangesTheQuestion(ThreeTimes):
    """Writes three times the values into what it was given, so that three times the output is right."""

    def answer(self, output, lse, q, k, v):
        v.mul_(3)
        return output, lse
