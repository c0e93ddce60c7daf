"""What a case takes, in useful operations and in elements. No torch."""

from collections.abc import Sequence

from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Call, Case

CPU_WORK = 1e8
"""Work of the largest case of a covering array that a CPU is asked for; larger ones are due on a GPU."""
LARGE_CPU_WORK = 3e9
"""Work of the largest case that a CPU is asked for where cases are about size."""
GPU_WORK = 6e10
"""Work of a case beyond which its batch is small in all but the pair that it is for."""
_OF_AN_ELEMENT, _OF_A_CALL, _OF_A_REQUEST = 100, 1e7, 2e5
"""Operations that take as long as an element, which is drawn, stored, checked and compared; as a call with all that is
judged of it; and as a request in a call."""


def useful_operations(case: Case, new: Sequence[int], context: Sequence[int]) -> float:
    """Operations of q·k and p·v over the visible pairs, of all calls and of the merged result where there is one.

    Args:
        case: gives heads, head dims and the entry that is driven.
        new: new tokens of each request.
        context: context tokens of each request.
    """
    causal = sum(length * (length + 1) / 2 for length in new) if case.is_causal else 0.0
    pairs = causal + sum(queries * keys for queries, keys in zip(new, context, strict=True))
    return 2.0 * case.sizes.columns * case.heads * pairs * (2 if case.is_merged else 1)


def operations_of(case: Case) -> float:
    """Useful operations of a case."""
    return useful_operations(case, case.q, case.visible_lens)


def work_of(case: Case) -> float:
    """Operations, and elements of queries, results, keys and caches, calls and their requests as so many more."""
    elements = sum(case.q) * case.sizes.row + (sum(case.q) + sum(case.kv)) * case.sizes.key
    calls = case.ranks if isinstance(case, CachedCase) else 1 + _chunks(case)
    if isinstance(case, CachedCase):
        elements += case.spare * case.page * case.layers * (case.kv_lora_rank + case.dimensions.qk_rope_head_dim)
    return operations_of(case) + _OF_AN_ELEMENT * elements + calls * (_OF_A_CALL + len(case.q) * _OF_A_REQUEST)


def _chunks(case: Case) -> int:
    """Chunks of the longest context, about; none where nothing is planned."""
    if case.call != Call.CHUNKED_CONTEXT or not any(case.kv):
        return 0
    share = max(case.page, case.workspace // sum(map(bool, case.kv)))
    return -(-max(case.kv) // share)


def is_light(case: Case, device_type: str = "cpu") -> bool:
    """Whether a device of this type is asked for a case of so much work, beside what only a few large ones hold."""
    return work_of(case) <= (CPU_WORK if device_type == "cpu" else GPU_WORK)
