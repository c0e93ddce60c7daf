"""The tiers reach the strength that they claim, with cases that can be built."""

from pathlib import Path

import pytest
import torch

from mla_conformance.cases.case import Call, Case
from mla_conformance.cases.combinations import PAIRS, TRIPLES, Space, cover, covered
from mla_conformance.cases.work import operations_of
from mla_conformance.cli import main
from mla_conformance.judging.needs import memory_need
from mla_conformance.problems.regimes import REGIMES
from mla_conformance.roles.table import build_problem
from mla_conformance.vocabulary.capabilities import CAPABILITIES, SPACES, Capability, Tier, nightly_cases
from mla_conformance.vocabulary.lists import LONG_CONTEXTS
from mla_conformance.vocabulary.tiers import tier_lines

every_space = pytest.mark.parametrize("space", SPACES.values(), ids=list(SPACES))


def cases_of(tier: Tier) -> list[Case]:
    return [case for capability in CAPABILITIES.values() for case in capability.select(tier)]


@every_space
@pytest.mark.parametrize(("tier", "strength"), [(Tier.SMOKE, 1), (Tier.FULL, PAIRS), (Tier.NIGHTLY, TRIPLES)])
def test_a_tier_reaches_its_strength(space: Space, tier: Tier, strength: int) -> None:
    assert space.lacking(cases_of(tier), strength) == []


def test_each_tier_tells_what_it_reaches_of_each_role() -> None:
    lines = list(tier_lines())
    full = lines[lines.index(next(line for line in lines if line.startswith("tier full"))) :]
    for line, space in zip(full[1:], SPACES.values(), strict=False):
        count = space.count(PAIRS)
        assert line.startswith(f"  {space.role}") and "strength 2 over" in line and f"{count} of {count} pairs" in line


def test_each_tier_holds_the_one_below_and_no_case_twice() -> None:
    smoke, full, nightly = (cases_of(tier) for tier in Tier)
    assert set(smoke) <= set(full) <= set(nightly)
    assert len(set(nightly)) == len(nightly)
    assert [len(CAPABILITIES[name].cases) <= 80 for name in SPACES] == [True] * len(SPACES)


@every_space
def test_a_row_and_its_case_say_the_same(space: Space) -> None:
    for row in cover(space.dimensions, PAIRS, [], space.possible):
        case = space.case_of(row)
        assert space.row_of(case) == row and Case.parse(case.id) == case


@every_space
def test_every_further_case_can_be_built(space: Space) -> None:
    for case in CAPABILITIES[space.capability].smoke:
        assert build_problem(case, torch.device("cpu")).calls


@every_space
def test_kernels_confined_to_a_part_meet_all_its_pairs(space: Space) -> None:
    rows = [space.row_of(case) for case in cases_of(Tier.FULL) if space.counts(case)]
    for part in space.parts:
        within = [row for row in rows if all(row.get(name) in values for name, values in part.items())]
        dimensions = {**space.dimensions, **part}
        assert cover(dimensions, PAIRS, within, space.possible) == []
        assert len(covered(within, dimensions, PAIRS)) > len(dimensions) ** 2


def test_several_query_tokens_stand_beside_no_row_of_padding() -> None:
    """Such a row has one token, so a kernel that takes as many of each request could not be asked."""
    combined = [*CAPABILITIES["decode_combinations"].cases, *nightly_cases("decode_combinations")]
    assert combined and not [case.id for case in combined if case.pad and max(case.q) > 1]


@every_space
def test_regimes_exist(space: Space) -> None:
    assert set(space.dimensions["data"]) <= set(REGIMES)


DENSE = """
from mla_conformance.backends.eager_decode import EagerDecodeBackend

class Dense(EagerDecodeBackend):
    supported_kv_cache_dtypes = ["auto"]
    supports_nonuniform_queries = False

    @staticmethod
    def get_supported_kernel_block_sizes():
        return [64]
"""


def test_pairs_that_declared_support_leaves_out_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dense.py").write_text(DENSE)
    assert main(["capabilities", "--backend", f"{tmp_path}/dense.py:Dense", "--device", "cpu"]) == 0
    headline, *reported = capsys.readouterr().out.splitlines()
    assert "decode: " in headline and "7 values and " in headline and " 0 pairs" not in headline
    assert reported[0] == "  no case: page=16, page=32, page=128, page=1, queries=uneven, cache=fp8,"
    assert any(" never with " in line for line in reported) and max(map(len, reported)) <= 80
    assert main(["capabilities", "--backend", "EAGER", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("0 values and 0 pairs of the others unreached") == len(SPACES)


def test_a_backend_that_cannot_run_here_is_an_input_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capabilities", "--backend", "TRTLLM_RAGGED", "--device", "cpu"]) == 2
    assert "TRTLLM_RAGGED cannot run here: " in capsys.readouterr().err


def test_long_contexts_are_nightly_only_and_state_their_need() -> None:
    assert set(LONG_CONTEXTS) <= {case for call in Call for case in nightly_cases(call)}
    assert max(max(case.kv, default=0) for case in LONG_CONTEXTS) == 2**20
    for case in LONG_CONTEXTS:
        assert 2e9 < memory_need(case, "cuda") < 130e9, case.id
        assert operations_of(case) > 1e12


@pytest.mark.parametrize("capability", CAPABILITIES.values(), ids=list(CAPABILITIES))
def test_the_smoke_tier_meets_every_role(capability: Capability) -> None:
    assert {case.role for case in capability.smoke} == {case.role for case in capability.cases}
    assert capability.smoke[0] is capability.cases[0] or capability.name in SPACES
