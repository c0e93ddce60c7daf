"""What a case takes, in useful operations and in elements, and simpler cases that take less. No torch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mla_conformance.backends.roles import Role
from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Call, Case, CaseError

CPU_WORK = 2e8  # of the largest case of a covering array that a CPU is asked for; larger ones are due on a GPU
LARGE_CPU_WORK = 3e9
"""Work of the largest case that a CPU is asked for where cases are about size, and that is fitted to a GPU's kernel."""
GPU_WORK = 2e10  # of a case beyond which its batch is small in all but the pair that it is for
_OF_AN_OPERATION = 0.7
_OF_A_TOKEN, _OF_AN_ELEMENT, _OF_A_SPARE_ELEMENT, _OF_A_WEIGHT = 6e3, 60, 5, 250
_OF_A_CALL, _OF_A_REQUEST = 8e6, 1e6
_AT_ONCE = {Role.TOPK: 100, Role.CACHE: 6, Role.COMPRESS: 6}  # by how much less tokens are that are drawn together
_OF_A_ROW, _OF_AN_OUTPUT, _OF_A_LISTED, _OF_A_LISTED_ELEMENT, _OF_A_SCORE = 5e5, 500, 200, 7, 8
_OF_A_LAYERS_ROW, _OF_A_LAYERS_OPERATION = 1e6, 100
"""What each takes on one core, the golden result and all that is judged of it included, about: in nanoseconds. Of a
decode rows and values of their outputs, of lists their entries, which name keys of so many elements where these are
attended to, of an indexer scores, and of a sparse layer rows of each rank and operations as well."""
_DECODES = (Role.DECODE, Role.TREE)
_STRUCTURE = {"capability", "call", "q", "kv", "heads", "dims"}
_SMALL = "small"


def work_of(case: Case) -> float:
    """About the nanoseconds that judging a case takes on one core of a CPU."""
    calls = (case.ranks if isinstance(case, CachedCase) else 1) + _chunks(case)
    # Of a preparation, whose context is a position, a table up to the largest one is made.
    tokens = sum(case.q) + (max(case.kv) // 4 if case.role is Role.PREPARE else sum(case.kv))
    # What a decode reads is shared by its heads.
    key = sum(case.latent_dims) if isinstance(case, CachedCase) and case.role in _DECODES else case.sizes.key
    elements = sum(case.q) * case.sizes.row + tokens * key
    work = _OF_A_TOKEN * tokens // _AT_ONCE.get(case.role, 1) + _OF_AN_ELEMENT * elements
    work += calls * (_OF_A_CALL + len(case.q) * _OF_A_REQUEST) + sum(case.q) * _of_a_row(case, calls)
    if isinstance(case, CachedCase) and case.sizes.key > 1:  # slots alone are computed of no cache
        work += _OF_A_SPARE_ELEMENT * case.spare * case.layers * case.block_elements
    if case.role in (Role.LAYER, Role.SPARSE_LAYER):
        head = case.dimensions
        work += _OF_A_WEIGHT * case.kv_lora_rank * case.heads * (head.qk_nope_head_dim + head.v_head_dim)
    operation = _OF_A_LAYERS_OPERATION if case.role is Role.SPARSE_LAYER else _OF_AN_OPERATION
    return work + (0 if case.role is Role.PREPARE else operation * case.operations())


def _of_a_row(case: Any, calls: int) -> float:
    """Beside its elements."""
    if case.role in _DECODES:
        return calls * (_OF_A_ROW + _OF_AN_OUTPUT * case.heads * case.kv_lora_rank)
    if case.role is Role.SPARSE:
        listed = case.topk + (case.extra_topk if case.has_extra else 0)
        return float(listed * (_OF_A_LISTED + _OF_A_LISTED_ELEMENT * case.sizes.key))
    if case.role is Role.INDEXER:  # whose scores are as wide as the largest length that is told
        return float(_OF_A_LISTED * case.topk + _OF_A_SCORE * max(case.totals) * case.inflate)
    if case.role is Role.TOPK:
        return float(_OF_A_LISTED * case.topk)
    return float(_OF_A_LAYERS_ROW * case.tp) if case.role is Role.SPARSE_LAYER else 0.0


def _chunks(case: Case) -> int:
    """Chunks of the longest context, or of new tokens of a compressor, about; none where nothing is planned."""
    if chunk := getattr(case, "chunk", 0):
        return max(case.q) // int(chunk)
    if case.call != Call.CHUNKED_CONTEXT or not any(case.kv):
        return 0
    return -(-max(case.kv) // max(case.page, case.workspace // sum(map(bool, case.kv))))


def is_light(case: Case) -> bool:
    """Whether a CPU is asked for a case of so much work, beside what only a few large ones hold."""
    return work_of(case) <= CPU_WORK


def simpler(case: Case) -> Iterator[Case]:
    """Valid cases one step simpler, the boldest first: fewer requests, tokens or heads, or fewer unusual fields."""
    for changes in _steps(case):
        try:
            candidate = replace(case, **changes)
        except CaseError:
            continue
        if candidate != case:
            yield candidate


def _steps(case: Case) -> Iterator[dict[str, Any]]:
    size = len(case.q) // 2
    while size:  # without half of the requests, a quarter, and so on down to one
        yield from (case.without(range(start, start + size)) for start in range(0, len(case.q), size))
        size //= 2
    yield from ({"data": regime} for regime in case.regimes if regime != case.data)
    if case.dims != _SMALL:
        yield {"dims": _SMALL}
    yield from ({"heads": heads} for heads in _smaller(case.heads, 1))
    yield from ({name: default} for name, default in case.defaults().items() if name not in _STRUCTURE)
    for name, lengths, least in (("q", case.q, 1), ("kv", case.kv, 0)):
        for index, length in enumerate(lengths):
            for shorter in _smaller(length, least):
                yield {name: (*lengths[:index], shorter, *lengths[index + 1 :])}


def _smaller(value: int, least: int) -> Iterator[int]:
    """The least value, then half of the way back, a quarter, and so on to one less."""
    distance = value - least
    while distance > 0:
        yield value - distance
        distance //= 2
