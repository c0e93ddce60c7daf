"""The lists reach every pair of classes that a row can hold, with cases that say the same as their rows."""

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call, Case
from mla_conformance.cases.covering import Pairs
from mla_conformance.cases.space import Space, held
from mla_conformance.cases.strategies import cases, profile
from mla_conformance.cases.work import CPU_WORK, operations_of, work_of
from mla_conformance.cli import main
from mla_conformance.judging.needs import memory_need
from mla_conformance.problems.regimes import REGIMES
from mla_conformance.roles.compress.case import VALUES as STATES
from mla_conformance.roles.prepare.case import VALUES
from mla_conformance.roles.sparse_layer.case import LATENTS
from mla_conformance.roles.table import build_problem
from mla_conformance.roles.topk.case import LOGITS
from mla_conformance.vocabulary.arrays import SPACES, array_of, digest_of
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Capability, Tier, counted, listed, nightly_cases
from mla_conformance.vocabulary.lists import LONG_CONTEXTS
from mla_conformance.vocabulary.tiers import tier_lines

every_space = pytest.mark.parametrize("space", SPACES.values(), ids=list(SPACES))

OUTSIDE = {
    "heads": {
        "sparse_layer_sizes:call=sparse_layer;dims=32-64-32-512;heads=64;q=[1,1];kv=[40,2300];cache=fp8_ds_mla;decodes=2;"
        "index_heads=64;topk=2048",
        "sparse_layer_sizes:call=sparse_layer;heads=64;q=[1,3];kv=[30,2046];decodes=1;index_heads=64;topk=2048",
        "sparse_layer_sizes:call=sparse_layer;heads=64;q=[1,3];kv=[30,2046];decodes=1;index_heads=64;topk=2048;shared=1",
    },
    "dims": {
        "mla_dims:dims=256-0-256-512;heads=2;q=[130];lse=0",
        "mla_dims:dims=32-16-32-64;heads=2;q=[130];lse=0",
        "mla_dims:call=context_chunk;dims=256-0-256-512;heads=2;q=[30];kv=[130]",
        "mla_dims:call=context_chunk;dims=32-16-32-64;heads=2;q=[30];kv=[130]",
        "v_padding:dims=32-16-64-64;q=[5,64];data=needle;lse=0",
        "v_padding:call=context_chunk;dims=32-16-64-64;q=[5,40];kv=[70,9]",
        "decode:dims=glm;heads=8;q=[1,1];kv=[200,9];page=64;lse=0",
        "decode_lse:call=decode;dims=4-4-4-4;heads=112;q=[16x40];kv=[3x40];page=64",
        "mixed_batch:call=layer;dims=16-8-16-32;heads=128;q=[5,1,1];kv=[60,40,0];data=needle;decodes=2",
        "index_hadamard:call=prepare_index;dims=8-8-16-16;heads=4;q=[2,1];kv=[63,5]",
        "index_rotation:call=prepare_index;dims=2-62-64-64;heads=4;q=[2,1];kv=[5,40];pairs=neighbours",
        "index_scales:call=prepare_index;dims=320-64-384-384;heads=4;q=[3,1];kv=[63,5];data=outliers;hadamard=0;fold=0",
        "index_scales:call=prepare_index;dims=320-64-384-384;heads=4;q=[3,1];kv=[63,5];data=outliers;hadamard=0;"
        "scales=pow2;fold=0",
    },
    "context": {"empty_rows:call=context_chunk;q=[3,4];kv=[0,0]", "chunked_context:q=[40,40];kv=[0,0]"},
    "longest": {"select:q=[1];kv=[0]"},
    "interleave": {"dcp:call=decode;q=[1x4];kv=[300,40,63,0];page=64;ranks=2;interleave=4096"},
}
"""Listed cases by the first dimension that they are outside of: head dims that few models have, which would take
further arrays; a context or a row of no key at all; so many tokens in a row that other ranks have none."""


def cases_of(tier: Tier) -> list[Case]:
    return [case for capability in CAPABILITIES.values() for case in capability.select(tier)]


@every_space
def test_the_lists_hold_every_pair_that_a_row_can_hold(space: Space) -> None:
    held_pairs, every = Pairs(space, map(space.row_of, listed(space))), Pairs.every(space)
    excluded = every - held_pairs
    assert not [pair for pair in excluded if space.completed(pair)]
    assert len(held_pairs) == len(every) - len(excluded) > 1000


@every_space
def test_every_excluded_pair_has_a_reason(space: Space) -> None:
    reasons = {rule.why for rule in space.all_rules}
    excluded = Pairs.every(space) - Pairs(space, map(space.row_of, listed(space)))
    assert {part for pair in excluded for part in space.reason(pair).split("; ")} <= reasons


@every_space
def test_the_smoke_tier_holds_every_class_of_an_array_that_a_cpu_is_asked_for(space: Space) -> None:
    light = [space.row_of(case) for case in array_of(space.capability) if work_of(case) <= CPU_WORK]
    smoke = [*counted(space, Tier.SMOKE), *CAPABILITIES[space.capability].smoke]
    found = {value for case in smoke for value in held(space.row_of(case))}
    assert {value for row in light for value in held(row)} <= found


@every_space
def test_a_row_of_every_class_and_its_case_say_the_same(space: Space) -> None:
    for value in space.values:
        row = space.completed((value,))
        assert row, f"{value}: no row holds it"
        case = space.case_of(row)
        assert space.row_of(case) == row and Case.parse(case.id) == case, case.id


@every_space
def test_arrays_stay_in_their_spaces_and_hold_no_case_twice(space: Space) -> None:
    array = array_of(space.capability)
    assert not [case.id for case in array if space.outside(case)]
    assert len(set(array)) == len(array) == len(CAPABILITIES[space.capability].cases)


def test_the_digest_of_the_arrays_is_of_their_cases() -> None:
    ids = [case.id for capability in SPACES for case in array_of(capability)]
    assert digest_of(["fitted"]) == hashlib.sha256("\n".join([*ids, "fitted"]).encode()).hexdigest()[:12]


def test_listed_cases_outside_of_their_space_are_known() -> None:
    found: dict[str, set[str]] = {}
    for space in SPACES.values():
        for case in listed(space):
            if outside := space.outside(case):
                found.setdefault(outside[0], set()).add(case.id)
    assert found == OUTSIDE


@every_space
def test_what_is_drawn_holds_only_pairs_that_are_claimed_and_possible(space: Space) -> None:
    classes = {each.name: list(each.classes) for each in space.dimensions}
    possible = Pairs(space, map(space.row_of, listed(space)))

    @profile(40)
    @given(case=cases(space, classes))
    def holds(case: Case) -> None:
        row = space.row_of(case)
        assert not space.outside(case) and Case.parse(case.id) == case
        assert all(label in classes[name] for name, label in held(row))
        assert not len(Pairs(space, [row]) - possible)

    holds()


def test_a_part_of_the_classes_bounds_what_is_drawn() -> None:
    space = SPACES["decode_combinations"]
    classes = {each.name: list(each.classes) for each in space.dimensions} | {
        "cache": ["auto"],
        "page": ["64"],
        "queries": ["1", "2"],
        "k_scale": [],
        "tile scales": [],
    }

    @profile(40)
    @given(case=cases(space, classes))
    def holds(case: Case) -> None:
        row = space.row_of(case)
        assert (row["cache"], row["page"]) == ("auto", "64") and row["queries"] in ("1", "2")

    holds()


def test_each_tier_tells_what_it_reaches_of_each_role() -> None:
    lines = list(tier_lines())
    assert [line.split()[1] for line in lines if line.startswith("tier")] == list(Tier)
    for space in SPACES.values():
        (line,) = (line for line in lines if line.strip().startswith(f"{space.role} "))
        possible = len(Pairs(space, map(space.row_of, listed(space))))
        light = len(Pairs(space, (space.row_of(case) for case in listed(space) if work_of(case) <= CPU_WORK)))
        assert f" {possible:,} pairs possible" in line
        assert f"full {possible:,}, {possible - light:,} due on a GPU" in line
        further = lines[lines.index(line) + 1].replace(",", "").split()
        assert further[1:5] == ["triples", "of", "these:", "full"] and int(further[0]) > int(further[5]) > possible
    assert max(map(len, lines)) <= 80


def test_excluded_pairs_are_listed_by_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["capabilities", "--excluded"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for space in SPACES.values():
        excluded = Pairs.every(space) - Pairs(space, map(space.row_of, listed(space)))
        assert f"{space.role}: {len(excluded)} pairs excluded" in lines
    assert "  ranks are merged by their LSE: 8 pairs" in lines
    assert "    ranks=2 with lse=not asked" in lines


def test_each_tier_holds_the_one_below_and_no_case_twice() -> None:
    smoke, full, nightly = (cases_of(tier) for tier in Tier)
    assert set(smoke) <= set(full) <= set(nightly)
    assert len(set(nightly)) == len(nightly)


@every_space
def test_every_smoke_case_of_an_array_can_be_built(space: Space) -> None:
    for case in CAPABILITIES[space.capability].smoke[:8]:
        assert build_problem(case, torch.device("cpu")).calls


def test_several_query_tokens_stand_beside_no_row_of_padding() -> None:
    """Such a row has one token, so a kernel that takes as many of each request could not be asked."""
    combined = array_of("decode_combinations")
    assert combined and not [case.id for case in combined if case.pad and min(case.q) == max(case.q) > 1]


@every_space
def test_regimes_exist(space: Space) -> None:
    found = [set(each.classes) for each in space.dimensions if each.name == "data"]
    named = {
        Role.TOPK: [{*LOGITS}],
        Role.PREPARE: [{*VALUES}],
        Role.COMPRESS: [{*STATES}],
        Role.CACHE: [],
        Role.SPARSE_LAYER: [{*LATENTS}],
    }
    assert found == named.get(space.role, [{*REGIMES}])


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


NARROW = """
from mla_conformance.backends.eager_decode import EagerDecodeBackend

class Narrow(EagerDecodeBackend):
    supported_kv_cache_dtypes = ["auto"]
    supports_nonuniform_queries = False

    @staticmethod
    def get_supported_kernel_block_sizes():
        return [64]
"""


def test_what_a_declaration_claims_and_refuses_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "narrow.py").write_text(NARROW)
    assert main(["capabilities", "--backend", f"{tmp_path}/narrow.py:Narrow", "--device", "cpu"]) == 0
    headline, *lines = capsys.readouterr().out.splitlines()
    assert headline.startswith("Narrow decode: ") and " cases fitted" in headline
    text = " ".join(" ".join(lines).split())
    assert (
        "refused on cpu: cache=fp8, cache=fp8_ds_mla" in text and "page=16, page=32" in text and "queries=mixed" in text
    )
    assert max(map(len, [headline, *lines])) <= 80


def test_a_backend_that_cannot_run_here_is_an_input_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capabilities", "--backend", "TRTLLM_RAGGED", "--device", "cpu"]) == 2
    assert "TRTLLM_RAGGED cannot run here: " in capsys.readouterr().err
