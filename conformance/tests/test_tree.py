"""The role tree: who sees whom in its golden results and masks."""

import math
from typing import Any

import pytest

from mla_conformance.backends.eager_tree import EagerTreeBackend
from mla_conformance.backends.tree import MLATreeMetadata
from mla_conformance.cases.case import Case
from mla_conformance.judging.record import Status
from mla_conformance.problems.calls import attention_call
from mla_conformance.roles.definition import build_problem, golden_of
from mla_conformance.roles.tree.case import TREES
from mla_conformance.roles.tree.problem import TreeBatch
from mla_conformance.tests.drawn import CPU, judged

MIXED = "tree_decode:dims=small;heads=2;q=[9,1,12,7];kv=[5,17,0,64];tree=random+chain+binary+star"


def batch_of(text: str) -> TreeBatch:
    return TreeBatch(Case.parse(text), CPU)  # type: ignore[arg-type]


def test_random_trees_have_siblings_and_early_ends_and_each_request_its_own() -> None:
    text = "tree_decode:q=[40,40,40];kv=[0,0,0]"
    trees = batch_of(text).parents()
    assert len(set(map(tuple, trees))) == 3 and trees == batch_of(text).parents()
    for parents in trees:
        drafted = [parents[1:].count(token) for token in range(40)]
        assert max(drafted) > 1 and 5 < drafted.count(0) < 35
    others = [batch_of(f"tree_decode:q=[5];kv=[0];tree={tree}").parents()[0] for tree in TREES[1:]]
    assert others == [[0, 0, 1, 2, 3], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]


def test_requests_in_another_order_keep_their_trees() -> None:
    (call,) = batch_of(MIXED).calls()
    other = attention_call(call.regrouped(None, [2, 0], None))
    assert [mask.tolist() for mask in other.masks] == [call.masks[request].tolist() for request in (2, 0)]
    assert other.metadata.tree_mask_start_loc.tolist() == [0, 144, 225]
    regrouped = MIXED.replace("tree_decode:", "batch_invariance:call=tree_decode;")
    assert judged(EagerTreeBackend, regrouped).status is Status.PASS


def test_a_tree_of_ones_own_rows_of_padding_and_masks_of_another_width() -> None:
    (call,) = batch_of("tree_decode:q=[4];kv=[9];parents=[0,0,0,1]").calls()
    assert call.masks[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert judged(EagerTreeBackend, "tree_decode:heads=2;q=[1,1];kv=[9,3];pad=2;parents=[0,0]").status is Status.PASS
    golden: Any = golden_of(build_problem(Case.parse("tree_decode:heads=2;q=[1,1];kv=[9,3];pad=2"), CPU))
    (state,) = golden.calls
    assert state.lse[:, 2:].eq(-math.inf).all() and not state.output[2:].any()
    (call,) = batch_of("tree_decode:dims=small;heads=2;q=[3,2];kv=[9,0]").calls()
    backend = EagerTreeBackend(2, 1.0, 32, 16, 8, 16, "auto", None)
    backend.prepare_metadata(MLATreeMetadata(**vars(call.metadata) | {"tree_mask": call.metadata.tree_mask[:-1]}))
    with pytest.raises(ValueError, match=r"tree_mask: expected \[13\] of torch.bool, .*, got \[12\]"):
        backend.run_tree_decode(call.ql_nope, call.q_pe, call.kv_cache, call.k_scale)
