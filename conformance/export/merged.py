"""Of a case that merges what several calls return, the one whose own result is wrong, as a problem of its own."""

from dataclasses import replace

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.export.heat import compared, heat_maps
from mla_conformance.export.literals import NotWritable
from mla_conformance.problems.operands import Draw
from mla_conformance.problems.problem import Problem
from mla_conformance.roles.prefill.call import PrefillCall
from mla_conformance.trials.trial import Observed


def wrong_call(ran: Problem, seen: Observed, declaration: Declaration) -> Problem:
    """The first call that is wrong by itself, on operands that its seed draws; the tensors of ``ran`` change.

    Keys of a chunk come out of a cache and through a projection, which no script of one call holds. So whether the
    call is wrong on others as well, only the script itself can tell.

    Args:
        ran: what was run last.
        seen: what was judged last, the same calls.
        declaration: what the adapter declares.

    Raises:
        NotWritable: all of them are right, or wrong only once they are merged.
    """
    wrong = {part.part for part in heat_maps(compared(seen, declaration)) if part.wrong}
    for call in ran.calls:
        if isinstance(call, PrefillCall) and wrong & {f"output of {call.name}", f"LSE of {call.name}"}:
            _redraw(call, Draw(ran.case, torch.device("cpu")).generator)
            return replace(ran, calls=(replace(call, prepares=True),))
    raise NotWritable(
        "the case merges what several calls return, none of which is wrong by itself; `replay --dump` writes all of it"
    )


def _redraw(call: PrefillCall, generator: torch.Generator) -> None:
    """Give the operands other values, in the order in which a script draws them, and the workspace none."""
    keys, queries = call.key_start_loc[-1], call.query_start_loc[-1]
    for x, rows in ((call.k, keys), (call.v, keys), (call.q, queries)):
        x[:rows] = torch.randn(rows, *x.shape[1:], generator=generator).to(x)
    if call.metadata.chunked_context is not None:
        call.metadata.chunked_context.workspace.fill_(torch.nan)
