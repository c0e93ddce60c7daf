"""The examples of docs: AITER's kernels behind classes of one's own, over stand-ins that compute alike."""

import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mla_conformance.backends.loading import load_backend
from mla_conformance.backends.references import parse_reference
from mla_conformance.cases.case import Case
from mla_conformance.diagnosis.explain import WHOLE, Failure, explain
from mla_conformance.judging.record import Record
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judged_trial
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Trial

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "aiter_kernels.py"
RAISED = "A tile without a visible key raises the running maximum to 0"
DECODE = "decode_multi_token:call=decode;dims=small;heads=1;q=[2];kv=[31];data=negative;page=32;lse=0"
SPARSE = "sparse_decode:call=sparse_decode;dims=small;heads=16;q=[1];kv=[20];topk=48;holes=front;data=negative;lse=0"


def zero_without_keys(maximum: torch.Tensor) -> torch.Tensor:
    """The mistake: what no key has raised yet goes on as 0."""
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


def mla_decode_fwd(q: Any, kv_buffer: Any, out: Any, cu_seqlens_q: Any, seqused_k: Any, **given: Any) -> None:
    """A split for each page, all of which is read, whatever stands behind the last key."""
    for request, rows in enumerate(pairwise(cu_seqlens_q.tolist())):
        length, rank, page = int(seqused_k[request]), given["kv_lora_rank"], kv_buffer.shape[1]
        pages = given["block_tables"][request, : -(-length // page)].long()
        keys = kv_buffer[pages, :, 0].float()
        last = torch.arange(length + rows[0] - rows[1], length)[:, None, None]
        seen = torch.arange(len(keys) * page).view(len(keys), 1, 1, page) <= last
        scores = torch.einsum("tnd,ckd->ctnk", q[slice(*rows)].float(), keys) * given["softmax_scale"]
        scores = scores.masked_fill(~seen, -torch.inf)
        maximum = zero_without_keys(scores.amax(dim=-1, keepdim=True))
        weights = (scores - maximum).exp()
        share = (maximum - maximum.amax(dim=0)).exp()
        total = (weights.sum(dim=-1, keepdim=True) * share).sum(dim=0)
        weighted = (torch.einsum("ctnk,ckd->ctnd", weights, keys[..., :rank]) * share).sum(dim=0)
        out[slice(*rows)] = torch.where(total == 0, 0.0, weighted / total)


def unified_attention_sparse_mla(q: Any, kv: Any, out: Any, topk_indices: Any, **given: Any) -> None:
    """A list in tiles of a page's tokens, one after the other."""
    slots, state = kv.flatten(0, 2), [torch.full((*q.shape[:2], 1), x) for x in (-torch.inf, 1.0, 0.0)]
    for columns in topk_indices.long().split(kv.shape[1], dim=1):
        named = columns >= 0
        keys = slots[columns.clamp(min=0)].masked_fill(~named[..., None], 0.0).float()
        scores = torch.einsum("tnd,tkd->tnk", q.float(), keys) * given["softmax_scale"]
        scores = scores.masked_fill(~named[:, None], -torch.inf)
        maximum = zero_without_keys(torch.maximum(state[0], scores.amax(dim=-1, keepdim=True)))
        weights, decay = (scores - maximum).exp(), (state[0] - maximum).exp()
        weighted = torch.einsum("tnk,tkd->tnd", weights, keys[..., : given["kv_lora_rank"]])
        state = [maximum, state[1] * decay + weights.sum(dim=-1, keepdim=True), state[2] * decay + weighted]
    out.copy_(state[2] / state[1])


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``judged(name, case)``: what comes of a class of the examples, over stand-ins and of any head dims."""
    for function in (mla_decode_fwd, unified_attention_sparse_mla):
        path = f"aiter.ops.triton.attention.{'mla' if function is mla_decode_fwd else function.__name__}"
        module = ModuleType(path)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, path, module)

    def judge(name: str, case: str) -> tuple[Trial, Record]:
        reference = parse_reference(f"{EXAMPLES}:{name}")
        monkeypatch.setattr(load_backend(reference), "supported_latent_dims", [])
        return judged_trial(Subject(reference, torch.device("cpu")), Case.parse(case), Context())

    return judge


@pytest.mark.parametrize(("name", "case"), [("AiterDecode", DECODE), ("AiterSparse", SPARSE)])
def test_a_maximum_that_a_tile_without_keys_resets_is_told(name: str, case: str, judged: Any) -> None:
    trial, record = judged(name, case)
    assert record.failed and RAISED in explain(Failure.of(trial, record), WHOLE)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("AiterDecode", DECODE.replace("negative", "normal")),
        ("AiterDecode", "decode:dims=small;heads=2;q=[1,1,1];kv=[0,0,63];page=64;lse=0"),
        ("AiterSparse", SPARSE.replace("negative", "normal")),
        ("AiterSparse", SPARSE.replace("front", "end")),
    ],
)
def test_other_logits_and_the_rest_of_a_page_are_right(name: str, case: str, judged: Any) -> None:
    assert not judged(name, case)[1].message
