"""Adapters of trees of drafts against stand-ins that honour a mask as their libraries document it."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.reference.selected import NO_KEY, selected_attention

OLD, NEW = "flashinfer-python 0.6.13", "flashinfer-python 0.7.2.post1"
BATCHES = ["q=[7,5,9];kv=[20,0,64];page=16", "q=[5,8,1,11];kv=[64,5,130,0];page=1;tree=star+binary"]
BATCHES += ["q=[1,1];kv=[9,70];pad=2"]
DIMS = {"SGLANG_TRITON_TREE": ("r1", "64-32-64-256"), "FLASHINFER_TREE": ("small", "64-64-128-192", "32-16-32-64")}


def masked(q: Tensor, k: Tensor, v: Tensor, starts: Any, mask: Tensor, mask_starts: Any, scale: float) -> Any:
    """Output of q's dtype and natural LSE [N, T], by rows of a mask with a column for each key of a request."""
    spans = [[slice(*each) for each in pairwise(x.tolist())] for x in starts]
    requests = list(zip(*spans, strict=True))
    selected = torch.full((len(q), max(keys.stop - keys.start for _, keys in requests)), NO_KEY)
    for (rows, keys), first in zip(requests, mask_starts.tolist(), strict=False):
        new, length = rows.stop - rows.start, keys.stop - keys.start
        seen = mask[first : first + new * length].view(new, length).bool()
        selected[rows, :length] = torch.arange(keys.start, keys.stop).where(seen, NO_KEY)
    state = selected_attention(q, k.nan_to_num(0.0), v.nan_to_num(0.0), selected, scale=scale)
    return state.output.to(q.dtype), state.lse.float()


def extend(a: Any) -> None:
    """Context by slots, new keys beside it; the columns of the context are not looked at."""
    contexts, starts = a["kv_indptr"], a["qo_indptr"]
    assert a["is_causal"] and a["custom_mask"].dtype == torch.uint8 and (a["k_scale"], a["v_scale"]) == (1.0, 1.0)
    assert a["q_extend"].is_contiguous() and a["v_extend"].is_contiguous() and a["skip_prefix_custom_mask"] is None
    assert a["max_len_extend"] == int(starts.diff().max())
    parts = zip(pairwise(contexts.tolist()), pairwise(starts.tolist()), strict=True)
    keys = torch.cat([x for (b, e), (f, g) in parts for x in (a["k_buffer"][a["kv_indices"][b:e]], a["k_extend"][f:g])])
    lengths = contexts.diff() + starts.diff()
    assert a["mask_indptr"].tolist() == [0, *(lengths * starts.diff()).cumsum(0).tolist()]
    ends, latent = torch.tensor([0, *lengths.cumsum(0)]), a["v_buffer"].shape[-1]
    arguments = (keys, keys[..., :latent], (starts, ends), a["custom_mask"], a["mask_indptr"], a["sm_scale"])
    output, lse = masked(a["q_extend"], *arguments)
    a["o_extend"].copy_(output)
    a["lse_extend"].copy_(lse.mT)


@pytest.fixture(params=["SGLANG_TRITON_TREE sglang 0.5.23", f"FLASHINFER_TREE {OLD}", f"FLASHINFER_TREE {NEW}"])
def name(request: Any, planned: Any, installed: Any, provided: Any) -> str:
    adapter, _, label = request.param.partition(" ")

    def run(wrapper: Any, a: Any) -> Any:
        plan, width = wrapper.planned, a["q"].shape[-1]
        assert (plan["head_dim_qk"], plan["head_dim_vo"], plan["num_kv_heads"]) == (width, width, 1)
        assert not plan["causal"]
        assert width in (64, 128, 256) and plan["custom_mask"].dtype == torch.bool
        starts = (plan["qo_indptr"], plan["kv_indptr"])
        mask_starts = torch.tensor([0, *(starts[0].diff() * starts[1].diff()).cumsum(0)])
        output, lse = masked(a["q"], a["k"], a["v"], starts, plan["custom_mask"], mask_starts, plan["sm_scale"])
        lse = lse if a.get("lse_base") == "ln" else lse / math.log(2)
        return output, lse if a.get("lse_layout") == "HN" else lse.mT.contiguous()

    if adapter == "FLASHINFER_TREE":
        file = "flashinfer/prefill.py:BatchPrefillWithRaggedKVCacheWrapper"
        wrapper = planned(label, file, run, lambda wrapper, a: None)
        installed("flashinfer", BatchPrefillWithRaggedKVCacheWrapper=wrapper)
    else:
        provided(label, "sglang.kernels.ops.attention.extend_attention", {"extend_attention_fwd": extend})
    return str(adapter)


def test_right_ones_pass(name: str, passes: Any) -> None:
    passes(name, Role.TREE, *(f"tree_decode:heads=2;dims={dims};{batch}" for dims in DIMS[name] for batch in BATCHES))


def test_what_has_no_kernel_is_a_reason(name: str, passes: Any) -> None:
    dims, said = ("small", "latent dims") if "SGLANG" in name else ("r1", "keys of 576 columns")
    (reason,) = passes(name, Role.TREE).unsupported(Case.parse(f"tree_decode:heads=2;dims={dims};q=[3];kv=[9]"))
    assert said in reason
