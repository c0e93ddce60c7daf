"""Where errors are, by head and row: maps of what was compared, one for each output and each LSE."""

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.diagnosis.heat_map import BEYOND, MOST, HeatMap, is_mapped
from mla_conformance.judging.record import Record
from mla_conformance.judging.steps import Measured
from mla_conformance.problems.calls import AttentionCall
from mla_conformance.problems.memory import out_of_memory
from mla_conformance.roles.table import measure
from mla_conformance.trials.trial import Observed, Trial


def compared(seen: Observed, declaration: Declaration) -> dict[str, Measured]:
    """What was compared, by name: output and LSE of each call, then of all calls merged; of attention alone."""
    calls = [call for call in seen.problem.calls if isinstance(call, AttentionCall)]
    if not calls:
        return {}
    names = [f"{what} of {call.name}" for call in calls for what in ("output", "LSE")[: 1 + call.returns_lse]]
    measured = measure(seen.problem, seen.expectation, seen.observation, declaration)
    return dict(zip([*names, "output merged", "LSE merged"], measured, strict=False))


def heat_map(part: str, measured: Measured) -> HeatMap:
    """The map of an output [T, N, V], of which the worst column counts, or of an LSE [N, T]; neither may be empty."""
    error = torch.where(measured.got == measured.golden, 0.0, (measured.got - measured.golden).abs())
    share = torch.where(error == 0, 0.0, error / measured.allowed).nan_to_num(torch.inf, torch.inf)
    by_head = share.amax(dim=-1).mT if share.dim() > 2 else share
    heads, rows = by_head.shape
    cells = min(heads, MOST), min(rows, MOST)
    largest = torch.nn.functional.adaptive_max_pool2d(by_head[None].double().contiguous(), cells)[0]
    digits = largest.log10().ceil().clamp(0, BEYOND).int().tolist()
    return HeatMap(part, heads, rows, tuple("".join(map(str, line)) for line in digits))


def heat_maps(parts: dict[str, Measured]) -> list[HeatMap]:
    return [heat_map(name, part) for name, part in parts.items() if part.got.numel()]


def heat_of(trial: Trial, record: Record) -> HeatMap | None:
    """The map of the part that has most cells over their budget, of a trial that failed by a wrong number.

    None where no element that was judged last is over its own, as where only the RMS of a row is, or memory runs out.
    """
    if not is_mapped(record) or trial.last is None:
        return None
    try:
        maps = heat_maps(compared(trial.last, trial.declaration))
    except (MemoryError, RuntimeError) as error:
        if out_of_memory(error):
            return None
        raise
    return max((each for each in maps if each.wrong), key=lambda each: each.wrong, default=None)
