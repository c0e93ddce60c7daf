"""The tiers reach the strength that they claim, with cases that can be built."""

import pytest

from mla_conformance.cases.capabilities import CAPABILITIES, Capability, Tier, nightly_cases
from mla_conformance.cases.case import Call, Case
from mla_conformance.cases.combinations import (
    COMBINATIONS,
    DIMENSIONS,
    PAIRS,
    TRIPLES,
    allowed,
    case_of,
    row_of,
    strength_share,
)
from mla_conformance.cases.covering import cover
from mla_conformance.cases.hazards import REGIMES
from mla_conformance.cases.long_contexts import LONG_CONTEXTS
from mla_conformance.cases.tiers import tier_lines
from mla_conformance.judging.needs import memory_need, operations_of


def cases_of(tier: Tier) -> list[Case]:
    return [case for capability in CAPABILITIES.values() for case in capability.select(tier)]


@pytest.mark.parametrize(("tier", "strength"), [(Tier.SMOKE, 1), (Tier.FULL, PAIRS), (Tier.NIGHTLY, TRIPLES)])
def test_a_tier_reaches_its_strength(tier: Tier, strength: int) -> None:
    assert strength_share(cases_of(tier), strength) == 1.0
    line = next(line for line in tier_lines() if f"tier {tier} " in line)
    assert f"strength {strength} over {len(DIMENSIONS)} dimensions" in line


def test_each_tier_holds_the_one_below_and_no_case_twice() -> None:
    smoke, full, nightly = (cases_of(tier) for tier in Tier)
    assert set(smoke) <= set(full) <= set(nightly)
    assert len(set(nightly)) == len(nightly)
    assert len(CAPABILITIES[COMBINATIONS].cases) <= 45


def test_a_row_and_its_case_say_the_same() -> None:
    for row in cover(DIMENSIONS, PAIRS, [], allowed):
        case = case_of(row)
        assert row_of(case) == row and Case.parse(case.id) == case


def test_regimes_exist() -> None:
    assert set(DIMENSIONS["data"]) <= set(REGIMES)


def test_long_contexts_are_nightly_only_and_state_their_need() -> None:
    assert set(LONG_CONTEXTS) <= {case for call in Call for case in nightly_cases(call)}
    assert max(max(case.kv, default=0) for case in LONG_CONTEXTS) == 2**20
    for case in LONG_CONTEXTS:
        assert 2e9 < memory_need(case, "cuda") < 130e9, case.id
        assert operations_of(case) > 1e12


@pytest.mark.parametrize("capability", CAPABILITIES.values(), ids=list(CAPABILITIES))
def test_the_smoke_tier_meets_every_role(capability: Capability) -> None:
    assert {case.role for case in capability.smoke} == {case.role for case in capability.cases}
    assert capability.smoke[0] is capability.cases[0]
