"""What the role cache is, and its judge: every byte of what their caller handed over to be written (SPEC 9)."""

from collections.abc import Iterator
from typing import Any, ClassVar

from mla_conformance.backends.cache import MLACacheSelectorConfig
from mla_conformance.backends.roles import Role
from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.judging.golden import Golden
from mla_conformance.judging.judged_rows import JudgedRows
from mla_conformance.judging.measured import Measured
from mla_conformance.judging.steps import Form, Steps
from mla_conformance.judging.verdict import Check, Verdict
from mla_conformance.problems.problem import Problem
from mla_conformance.roles.cache.problem import SLOT_DTYPES, CacheBatch
from mla_conformance.roles.definition import RoleDefinition


def golden_bytes(problem: Problem) -> Golden:
    """Every row is judged; what is expected stands in the problem's own images."""
    return Golden(JudgedRows(problem.query_start_loc))


class CacheJudge(Steps):
    """The steps of the verdict on a cache operation, whose result is what it has written."""

    writes: ClassVar = Check.WRITTEN

    def __init__(self, problem: Problem, expectation: Golden, *_: Any) -> None:
        super().__init__(problem, expectation)

    def measured(self, observation: Observation) -> Iterator[Measured]:
        return iter(())

    def _form(self, returned: Returned) -> Verdict | None:
        """Whatever a call returns, nobody looks at it."""
        return None

    def _expected_form(self, returned: Returned) -> Form:
        return []

    def _numbers(self, observation: Observation) -> Iterator[Verdict | None]:
        return iter(())


CACHE = RoleDefinition(
    role=Role.CACHE,
    batch=CacheBatch,
    config=MLACacheSelectorConfig,
    constructed=("kv_lora_rank", "qk_rope_head_dim", "kv_cache_dtype", "tile_scales"),
    facts=lambda case, dtype: {
        "slot_dtype": SLOT_DTYPES[case.slots],
        "dequantise": case.dequantise,
        "compress_ratio": case.ratio,
        "outside": case.outside,
    },
    golden=golden_bytes,
    judge=CacheJudge,
)
