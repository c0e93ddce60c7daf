"""The covering arrays of the spaces: which cases hold every pair of classes, as ``ci/arrays.py`` found them. No torch.

They are kept, since finding them takes longer than judging some of them.
"""

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from itertools import chain

from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cases.covering import Pairs, cover
from mla_conformance.cases.space import Row, Space
from mla_conformance.cases.work import is_light
from mla_conformance.roles.cache.space import CACHE
from mla_conformance.roles.compress.space import COMPRESS
from mla_conformance.roles.decode.space import DECODE
from mla_conformance.roles.indexer.space import INDEXER
from mla_conformance.roles.layer.space import LAYER
from mla_conformance.roles.prefill.space import PREFILL
from mla_conformance.roles.prepare.space import PREPARE
from mla_conformance.roles.sparse.space import SPARSE
from mla_conformance.roles.sparse_layer.space import SPARSE_LAYER
from mla_conformance.roles.topk.space import TOPK

SPACES: dict[str, Space] = {
    space.capability: space
    for space in (PREFILL, DECODE, LAYER, SPARSE, INDEXER, TOPK, PREPARE, COMPRESS, CACHE, SPARSE_LAYER)
}
"""By the capability whose cases their arrays are."""


@cache
def array_of(capability: str) -> tuple[Case, ...]:
    """The cases of a capability's covering array."""
    return tuple(map(Case.parse, _kept()[capability]))


@cache
def _kept() -> dict[str, list[str]]:
    """The ids of each array, as they are kept."""
    kept = json.loads((files("mla_conformance.fixtures") / "arrays.json").read_text(encoding="utf-8"))
    return {capability: [f"{capability}:{fields}" for fields in array] for capability, array in kept.items()}


def digest_of(fitted: Iterable[str]) -> str:
    """Twelve hexadecimal digits of the arrays, and of cases that were fitted beside them."""
    text = "\n".join([*chain.from_iterable(_kept()[name] for name in SPACES), *sorted(fitted)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def could_be_fitted(id: str) -> bool:
    """Whether a case is of a covering array's capability and of classes alone."""
    try:
        case = Case.parse(id)
    except CaseError:
        return False
    return case.capability in SPACES and not SPACES[case.capability].outside(case)


def found_array(space: Space, given: Iterable[Case]) -> tuple[list[Row], Pairs]:
    """Rows that, with given cases, hold every pair that a row can hold; and the pairs that none can.

    As many as can be are held by rows that a CPU is asked for.
    """
    missing = Pairs.every(space) - Pairs(space, map(space.row_of, given))
    light, without = cover(space, missing, lambda row: is_light(space.case_of(row)))
    heavy, without = cover(space, without, lambda row: is_light(space.case_of(row), "cuda"))
    largest, impossible = cover(space, without, small=True)
    return [*light, *heavy, *largest], impossible
