"""What of a case is to be reproduced: the call that was judged last, and the verdict on it; or all of it as files."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mla_conformance.cases.case import Case
from mla_conformance.diagnosis.reach import compared, heat_maps
from mla_conformance.driving.driver import parts_of, why_not_plain
from mla_conformance.export.inputs import NotWritable, by_request, same
from mla_conformance.files.whole import InputError, write_output
from mla_conformance.judging.record import ARITHMETIC, Record, Status
from mla_conformance.problems import calls, operands
from mla_conformance.report.html import picture_file
from mla_conformance.roles.decode.case import DecodeCase
from mla_conformance.roles.prefill.case import PrefillCase
from mla_conformance.roles.prefill.problem import PrefillCall
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, Observed, judged_trial

_CACHES = ("auto", "fp8")


@dataclass(frozen=True)
class Reproduced:
    subject: Subject  # the backend on its device
    case: Case  # what was asked for
    problem: calls.Problem  # inputs of the call that decided, the only one of its problem
    record: Record  # a pass, or a failure by a wrong number
    excused: tuple[int, ...] = ()  # requests whose inputs were spoiled, so that their own rows are not judged
    is_redrawn: bool = False  # whether the call is one of several, with other operands than the case gives it
    looks_like: str = ""  # what the failure looks like; empty where nothing explains it

    @property
    def call(self) -> calls.AttentionCall:
        return self.problem.attention[0]


def require_one_call(case: Case) -> None:
    """Refuse what no script of one call can show: another role, parts of several ranks, codes for output, or tiles."""
    if not isinstance(case, PrefillCase | DecodeCase):
        said = f"this is a {case.role} case, whose tensors `replay --dump` writes"
        raise NotWritable(f"a script makes one call of a prefill or a decode kernel; {said}")
    if isinstance(case, DecodeCase) and case.is_merged:
        raise NotWritable("the case merges what several ranks return; `replay --dump` writes all of it")
    if isinstance(case, PrefillCase) and case.quant != "none":
        raise NotWritable("an output in e4m3 codes is judged by intervals, which a script does not hold")
    if isinstance(case, DecodeCase) and case.cache not in _CACHES:
        raise NotWritable(f"a cache of {case.cache} is not written into scripts; {' and '.join(_CACHES)} are")


def reproduced(subject: Subject, case: Case) -> Reproduced:
    """Judge a case as ever, and keep the call that decided, if there is one that failed by a number."""
    trial, record = judged_trial(subject, case, Context())
    if record.status is not Status.PASS and (record.status is not Status.FAIL or record.check not in ARITHMETIC):
        raise NotWritable(f"a script shows wrong numbers; the verdict is {record.status}: {record.message}")
    if trial.last is None or (len(trial.last.observation.returned) != 1 and not case.is_merged):
        raise NotWritable("a script holds one call; this case was decided otherwise")
    made = called(trial.last)
    if case.is_merged:
        # The first of several calls that is wrong by itself, on operands that its seed draws, since keys of a chunk
        # come out of a cache and through a projection; whether it is wrong on these as well, only the script can tell.
        wrong = {part.part for part in heat_maps(compared(trial.last, trial.declaration)) if part.wrong}
        for call in made.calls:
            if isinstance(call, PrefillCall) and wrong & {f"output of {call.name}", f"LSE of {call.name}"}:
                generator = operands.Draw(made.case, torch.device("cpu")).generator
                keys, queries = call.key_start_loc[-1], call.query_start_loc[-1]
                for x, rows in ((call.k, keys), (call.v, keys), (call.q, queries)):  # in the order of a script's draws
                    x[:rows] = torch.randn(rows, *x.shape[1:], generator=generator).to(x)
                if call.metadata.chunked_context is not None:
                    call.metadata.chunked_context.workspace.fill_(torch.nan)
                alone = replace(made, calls=(replace(call, prepares=True),))
                return Reproduced(subject, case, alone, record, is_redrawn=True)
        several = "the case merges what several calls return, none of which is wrong by itself"
        raise NotWritable(f"{several}; `replay --dump` writes all of it")
    mine, judged, spoiled = made.attention[0], trial.last.problem.attention[0], list[int]()
    # The requests whose inputs differ, where a call was judged by what another one has to return.
    if mine is not judged and mine.query_start_loc == judged.query_start_loc:
        pairs = enumerate(zip(by_request(mine), by_request(judged), strict=True))
        spoiled = [request for request, inputs in pairs if not all(map(same, *inputs))]
    return Reproduced(subject, case, made, record, tuple(spoiled))


def called(seen: Observed) -> calls.Problem:
    """The calls that were made, which may have other inputs than those they were judged by."""
    return replace(seen.problem, calls=tuple(returned.call for returned in seen.observation.returned))


_TOLD = """# {case}

{backend}: {verdict}

    import torch
    data = torch.load("tensors.pt", weights_only=True)

`data["operands"]` is what the backend was handed, in its memory layout; `data["returned"]` what it returned. By part:
`data["golden"]` the right result, `data["error"]` how far the returned one is from it, `data["budget"]` how far it may
be: outputs [rows, heads, columns], LSEs [heads, rows], all in float64. The budget of a row that came out larger than
the right one is larger, too. Pictures of where they are over their budget: {pictures}.
"""


def dump(subject: Subject, case: Case, folder: Path, salt: str = "") -> None:
    """Judge a case in this process, on inputs of this salt, and write what that was by."""
    trial, record = judged_trial(subject, case, Context(salt))
    if trial.last is None:
        raise InputError(f"--dump: nothing was run, the verdict is {record.status}: {record.message}")
    parts = compared(trial.last, trial.declaration)
    pictures = {f"{each.part.replace(' ', '-')}.svg": picture_file(each) for each in heat_maps(parts)}
    verdict, drawn = (f"{record.status}: {record.message}" if record.message else record.status), ", ".join(pictures)
    told = _TOLD.format(case=case.id, backend=record.backend, verdict=verdict, pictures=drawn or "none was compared")
    for name, text in ({"README.md": told} | pictures).items():
        write_output(folder / name, text)
    data: dict[str, Any] = {"case": case.id, "operands": called(trial.last).caller_owned, "returned": {}}
    for each in trial.last.observation.returned:
        named = zip(("output", "LSE"), parts_of(each.value), strict=False)
        data["returned"] |= {f"{name} of {each.call.name}": part for name, part in named if not why_not_plain(part)}
    data["golden"] = {name: part.golden for name, part in parts.items()}
    # How far a result is off; 0 where both are -inf.
    off = {name: torch.where(x.got == x.golden, 0.0, (x.got - x.golden).abs()) for name, x in parts.items()}
    data |= {"error": off, "budget": {name: part.allowed for name, part in parts.items()}}
    file = folder / "tensors.pt"
    try:
        torch.save(data, file)
    except OSError as error:
        raise InputError(f"{file}: cannot be written: {error.strerror}") from error
