"""What a case takes, in useful operations and in elements. No torch."""

from mla_conformance.backends.roles import Role
from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Call, Case

CPU_WORK = 2e8  # of the largest case of a covering array that a CPU is asked for; larger ones are due on a GPU
LARGE_CPU_WORK = 3e9
"""Work of the largest case that a CPU is asked for where cases are about size, and that is fitted to a GPU's kernel."""
GPU_WORK = 1e11  # of a case beyond which its batch is small in all but the pair that it is for
_OF_AN_OPERATION = 0.7
_OF_A_TOKEN, _OF_AN_ELEMENT, _OF_A_SPARE_ELEMENT, _OF_A_WEIGHT = 6e3, 60, 5, 250
_OF_A_CALL, _OF_A_REQUEST = 8e6, 1e6
_OF_A_ROW, _OF_AN_OUTPUT, _OF_A_LISTED, _OF_A_LAYERS_ROW = 5e5, 500, 1e3, 2.5e6
"""What each takes on one core, the golden result and all that is judged of it included, about: in nanoseconds. Of a
decode rows and values of their outputs, of lists their entries, and of a sparse layer rows as well."""

_DECODES = (Role.DECODE, Role.TREE)


def work_of(case: Case) -> float:
    """About the nanoseconds that judging a case takes on one core of a CPU."""
    calls = (case.ranks if isinstance(case, CachedCase) else 1) + _chunks(case)
    # Of a preparation, whose context is a position, a table up to the largest one is made.
    tokens = sum(case.q) + (max(case.kv) // 4 if case.role is Role.PREPARE else sum(case.kv))
    if case.role is Role.TOPK:  # whose tokens are logits, which are drawn and compared at once
        tokens //= 10
    # What a decode reads is shared by its heads.
    key = sum(case.latent_dims) if isinstance(case, CachedCase) and case.role in _DECODES else case.sizes.key
    elements = sum(case.q) * case.sizes.row + tokens * key
    work = _OF_A_TOKEN * tokens + _OF_AN_ELEMENT * elements + calls * (_OF_A_CALL + len(case.q) * _OF_A_REQUEST)
    if isinstance(case, CachedCase) and case.sizes.key > 1:  # slots alone are computed of no cache
        work += _OF_A_SPARE_ELEMENT * case.spare * case.page * case.layers * sum(case.latent_dims)
    if case.role in (Role.LAYER, Role.SPARSE_LAYER):
        head = case.dimensions
        work += _OF_A_WEIGHT * case.kv_lora_rank * case.heads * (head.qk_nope_head_dim + head.v_head_dim)
    if case.role in _DECODES:
        work += calls * sum(case.q) * (_OF_A_ROW + _OF_AN_OUTPUT * case.heads * case.kv_lora_rank)
    if case.role is Role.SPARSE:
        work += _OF_A_LISTED * sum(case.q) * int(getattr(case, "topk", 0))
    if case.role is Role.SPARSE_LAYER:
        work += _OF_A_LAYERS_ROW * sum(case.q)
    if case.role is not Role.PREPARE:
        work += _OF_AN_OPERATION * case.operations()
    return work


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
