"""The error budget of a call as source text: element rule and LSE rule of SPEC 4.2, with the numbers of this kernel."""

import textwrap

from mla_conformance.export.failing import Reproduced
from mla_conformance.judging.tolerance import roundoffs, tolerance
from mla_conformance.reference.error_budget import FLOAT32_ROUNDOFF, Roundoffs

_MARGIN = 107


def budget_lines(found: Reproduced) -> dict[str, str]:
    """Expressions of the script's names for the sums of a row; the limits on both are those of the tolerance table."""
    call, numbers = found.call, tolerance()
    declared = found.subject.declaration_of(found.problem.case.role).rounding_of(found.problem.dtype)
    most_keys, dequantised = max(call.key_lens), call.question().dequantised
    allowed = roundoffs(found.problem.output_dtype, declared, numbers, None, most_keys, dequantised)
    return {
        "output": _sum(_of_output(allowed), numbers.element_limit),
        "lse": _sum(_of_lse(allowed), numbers.lse_limit),
    }


def _of_output(allowed: Roundoffs) -> dict[str, float]:
    """Factors of what an element may be off by."""
    steps = allowed.accumulation * FLOAT32_ROUNDOFF
    moved = allowed.keys + allowed.scores
    weights = allowed.p + allowed.partials + allowed.row_sum + 2 * allowed.exp
    return {
        "a": weights + steps + allowed.keys + allowed.values,
        "e": steps + moved,
        "output.abs()": allowed.output,
        "size[..., None] * output.abs()": moved,
        "peak": allowed.p_floor,
        "": allowed.output_floor,
    }


def _of_lse(allowed: Roundoffs) -> dict[str, float]:
    """Factors of what an LSE may be off by."""
    steps = allowed.accumulation * FLOAT32_ROUNDOFF
    moved = allowed.keys + allowed.scores
    return {"(size + lse.abs() + 1)": steps, "size": moved, "": allowed.row_sum + allowed.exp}


def _sum(factors: dict[str, float], limit: float) -> str:
    """Those that count, each before its sum; in brackets, if they take several lines."""
    counted = {name: f"{limit * factor:.9g}" for name, factor in factors.items() if factor}
    terms = " + ".join(f"{factor} * {name}" if name else factor for name, factor in counted.items())
    if len(terms) <= _MARGIN:
        return terms
    return "\n        ".join(["(", *textwrap.wrap(terms, _MARGIN)]) + "\n    )"
