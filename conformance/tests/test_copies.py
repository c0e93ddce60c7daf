"""Copies of inputs, and what tells that their bytes changed."""

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.problems.memory import Original, Snapshot, same_bytes, storage_bytes
from mla_conformance.roles.table import build_problem

CPU = torch.device("cpu")
LAYER = "layer:q=[5,1];kv=[9,4];page=16;workspace=64;decodes=1;layers=2"


def test_a_copy_has_the_same_bytes_in_storages_of_its_own() -> None:
    case = Case.parse(LAYER)
    built = build_problem(case, CPU)
    kept, copied = Original(built, [case]).copy(), Original(built).copy()
    assert kept.case is case and copied.case == case and copied.case is not case
    for mine, theirs in zip(kept.tensors(), built.tensors(), strict=True):
        assert (mine.stride(), mine.storage_offset()) == (theirs.stride(), theirs.storage_offset())
        assert same_bytes(storage_bytes(mine), storage_bytes(theirs))
        assert mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()


def test_what_shares_a_storage_or_is_one_tensor_does_so_in_a_copy() -> None:
    whole = torch.arange(12.0).view(3, 4)
    one, view, same = Original((whole, whole[1:, ::2], whole)).copy()
    assert same is one and torch.equal(view, one[1:, ::2])
    one.zero_()
    assert not view.any() and whole.any()


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 100_003])
def test_every_byte_is_compared(size: int) -> None:
    x = torch.arange(size).to(torch.uint8)
    assert same_bytes(x, x.clone())
    for place in {0, size // 2, size - 1} if size else ():
        other = x.clone()
        other[place] ^= 128
        assert not same_bytes(x, other)


def test_a_snapshot_tells_what_differs_of_what_it_kept_in_time() -> None:
    a, b, beside = torch.zeros(9), torch.zeros(5000), torch.zeros(3)
    snapshot = Snapshot({"a": a, "b": b, "rows of b": b[10:]})
    snapshot.keep([b, beside])
    b[4999], beside[0] = 1.0, 1.0
    assert snapshot.changed() == ["b", "rows of b"]
    b[4999] = 0.0
    snapshot.keep()
    a[0] = 1.0
    assert snapshot.changed() == ["a"]
