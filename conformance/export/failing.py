"""What of a case is to be reproduced: the call that was judged last, and the verdict on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import Observation
from mla_conformance.export.literals import NotWritable
from mla_conformance.export.merged import wrong_call
from mla_conformance.judging.verdict import ARITHMETIC, Nonconformance, Status, Verdict
from mla_conformance.problems.calls import AttentionCall
from mla_conformance.problems.operands import ProblemError, segments
from mla_conformance.problems.problem import Problem
from mla_conformance.roles.decode.call import DecodeCall
from mla_conformance.roles.decode.case import DecodeCase
from mla_conformance.roles.prefill.case import PrefillCase
from mla_conformance.trials.context import Context
from mla_conformance.trials.procedures import PROCEDURES
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Trial
from mla_conformance.vocabulary.capabilities import find_capability

_CACHES = ("auto", "fp8")


@dataclass(frozen=True)
class Reproduced:
    """One call, and what is said of it.

    Attributes:
        subject: the backend on its device.
        case: what was asked for.
        problem: inputs of the call that decided, the only one of its problem.
        verdict: pass, or a failure by a wrong number.
        excused: requests whose inputs were spoiled, so that their own rows are not judged.
        is_redrawn: whether the call is one of several, with other operands than the case gives it.
        looks_like: what the failure looks like; empty where nothing explains it.
    """

    subject: Subject
    case: Case
    problem: Problem
    verdict: Verdict
    excused: tuple[int, ...] = ()
    is_redrawn: bool = False
    looks_like: str = ""

    @property
    def call(self) -> AttentionCall:
        """The call."""
        return self.problem.attention[0]


class Watched(Trial):
    """A trial that knows what it ran last."""

    ran: Problem | None = None

    def run(self, instance: Any, problem: Problem, prepare: bool = True) -> Observation:
        """See :class:`Trial`."""
        self.ran = problem
        return super().run(instance, problem, prepare)


def require_one_call(case: Case) -> None:
    """Refuse what no script of one call can show.

    Raises:
        NotWritable: another role, parts of several ranks, codes for output, or a cache of tiles.
    """
    if not isinstance(case, PrefillCase | DecodeCase):
        raise NotWritable(f"a script makes one call of a prefill or a decode kernel; this is a {case.role} case")
    if isinstance(case, DecodeCase) and case.is_merged:
        raise NotWritable("the case merges what several ranks return; `replay --dump` writes all of it")
    if isinstance(case, PrefillCase) and case.quant != "none":
        raise NotWritable("an output in e4m3 codes is judged by intervals, which a script does not hold")
    if isinstance(case, DecodeCase) and case.cache not in _CACHES:
        raise NotWritable(f"a cache of {case.cache} is not written into scripts; {' and '.join(_CACHES)} are")


def reproduced(subject: Subject, case: Case) -> Reproduced:
    """Judge a case as ever, and keep the call that decided.

    Raises:
        NotWritable: nothing was judged, or it did not fail by a number.
    """
    trial, verdict = watched(subject, case)
    if verdict.status is not Status.PASS and (verdict.status is not Status.FAIL or verdict.check not in ARITHMETIC):
        raise NotWritable(f"a script shows wrong numbers; the verdict is {verdict.status}: {verdict.message}")
    if trial.ran is not None and trial.last is not None and case.is_merged:
        alone = wrong_call(trial.ran, trial.last, trial.declaration)
        return Reproduced(subject, case, alone, verdict, is_redrawn=True)
    if trial.ran is None or len(trial.ran.calls) != 1:
        raise NotWritable("a script holds one call; this case was decided otherwise")
    judged = trial.last.problem if trial.last else trial.ran
    return Reproduced(subject, case, trial.ran, verdict, _spoiled(trial.ran.attention[0], judged.attention[0]))


def watched(subject: Subject, case: Case, salt: str = "") -> tuple[Watched, Verdict]:
    """A trial of a case on inputs of this salt, with its verdict.

    Raises:
        NotWritable: no inputs can be built for it.
    """
    trial = Watched(subject, case, Context(salt))
    return trial, _verdict(trial)


def _verdict(trial: Trial) -> Verdict:
    reasons = trial.subject.missing_role(trial.case)
    try:
        reasons = reasons or trial.unsupported()
        if not reasons:
            PROCEDURES[find_capability(trial.case.capability).procedure](trial)
    except Nonconformance as outcome:
        return outcome.verdict
    except ProblemError as error:
        raise NotWritable(str(error)) from error
    return Verdict(Status.UNSUPPORTED, "; ".join(reasons)) if reasons else trial.verdict


def _spoiled(ran: AttentionCall, judged: AttentionCall) -> tuple[int, ...]:
    """The requests whose inputs differ, where a call was judged by what another one has to return."""
    if ran is judged or ran.query_start_loc != judged.query_start_loc:
        return ()
    pairs = zip(by_request(ran), by_request(judged), strict=True)
    return tuple(request for request, (mine, theirs) in enumerate(pairs) if not all(map(same, mine, theirs)))


def by_request(call: AttentionCall) -> list[tuple[torch.Tensor, ...]]:
    """Queries, and keys and values or cache entries, of each request."""
    rows, keys = list(segments(call.query_start_loc)), list(segments(call.key_start_loc))
    if isinstance(call, DecodeCall):
        entries = cached_entries(call)
        return [(call.ql_nope[r], call.q_pe[r], entries[k]) for r, k in zip(rows, keys, strict=True)]
    return [(call.q[r], call.k[k], call.v[k]) for r, k in zip(rows, keys, strict=True)]


def cached_entries(call: DecodeCall) -> torch.Tensor:
    """[S, width] entries of all requests, one after the other, from the pages."""
    page, table = call.kv_cache.shape[1], call.metadata.block_table.long()
    tokens = [torch.arange(length, device=table.device) for length in call.metadata.seq_lens_cpu.tolist()]
    parts = [
        call.kv_cache.view(torch.uint8)[table[request, token // page], token % page]
        for request, token in enumerate(tokens)
    ]
    return torch.cat(parts).view(call.kv_cache.dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers; one NaN is as good as another."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(equal_elements(a, b).all())


def equal_elements(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two tensors hold the same number, of one shape."""
    a, b = a.cpu().double(), b.cpu().double()
    return (a == b) | (a.isnan() & b.isnan())


def changed_rows(drawn: torch.Tensor, wanted: torch.Tensor) -> Sequence[tuple[int, int]]:
    """First row and end of each run of rows that differ."""
    differs = (~equal_elements(drawn, wanted)).flatten(1).any(dim=1).int()
    steps = torch.nn.functional.pad(differs, (1, 1)).diff()
    starts, ends = ((steps == sign).nonzero()[:, 0].tolist() for sign in (1, -1))
    return list(zip(starts, ends, strict=True))
