"""SGLang's compressor against a stand-in that keeps and pools states as its source says: by slots that a plan names."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import roles

_FILE = "sglang/kernels/ops/attention/dsv4/compress.py"
_D, _R = 512, 64


class Library:
    def __init__(self, recorded: Any) -> None:
        def function(name: str, call: Any) -> Any:
            return recorded("sglang 0.5.23", f"{_FILE}:{name}", call)

        plans = {"Decode": lambda a: [1] * len(a["seq_lens"]), "Prefill": lambda a: a["extend_lens"].tolist()}
        for name, new in plans.items():
            plan = function(f"Compressor{name}Plan.generate", lambda a, new=new: self.planned(a, new(a)))
            setattr(self, f"Compressor{name}Plan", SimpleNamespace(generate=plan))
        self.compress_forward = function("compress_forward", self.pooled)
        self.compress_norm_rope_store = function("compress_norm_rope_store", self.stored)

    def planned(self, a: Any, new: list[int]) -> Any:
        ratio, page, ring = (a[name] for name in ("compress_ratio", "swa_page_size", "ring_size"))
        assert page % ring == ring % ratio == 0 and min(new) > 0 and a.get("num_q_tokens", len(new)) == sum(new)
        assert a["req_to_token"].dtype == torch.int32 and a["full_to_state"].dtype == torch.int64

        def slot(request: int, position: int) -> int:
            if ratio == 128:  # by the request alone
                return request * ring + position % ring
            state = int(a["full_to_state"][a["req_to_token"][request, position]])
            return state // page * ring + state % ring

        totals = a["seq_lens"].tolist()
        tokens = [(r, n - m + i) for r, (n, m) in enumerate(zip(totals, new, strict=True)) for i in range(m)]
        ends = [t for t, (_, p) in enumerate(tokens) if (p + 1) % ratio == 0]
        return SimpleNamespace(ratio=ratio, slot=slot, tokens=tokens, ends=ends)

    def pooled(self, a: Any) -> Tensor:
        states, columns, ape, plan = (a[name] for name in ("kv_score_buffer", "kv_score_input", "ape", "plan"))
        ratio, overlap = plan.ratio, plan.ratio == 4
        assert states.shape[1:] == (ratio, columns.shape[1]) and states.is_contiguous() and columns.is_contiguous()
        kept, ape, entries = states.view(-1, columns.shape[1]), ape.view(-1, _D), []
        rows = {token: row for token, row in zip(plan.tokens, columns, strict=True)}
        for request, last in (plan.tokens[t] for t in plan.ends):
            own = range(last - ratio + 1, last + 1)
            window = [*(range(own.start - ratio, own.start) if overlap and own.start else ()), *own]
            found = [rows.get((request, p), kept[plan.slot(request, p)]) for p in window]
            halves = [(p >= own.start) * _D if overlap else 0 for p in window]
            k = torch.stack([row[h : h + _D] for row, h in zip(found, halves, strict=True)])
            score = torch.stack([row[row.numel() // 2 + h :][:_D] for row, h in zip(found, halves, strict=True)])
            places = [p % ratio + (ratio if overlap and p >= own.start else 0) for p in window]
            entries.append(((score + ape[places]).softmax(0) * k).sum(0))
        for token, row in rows.items():
            kept[plan.slot(*token)] = row
        return torch.stack(entries) if entries else columns.new_empty(0, _D)

    def stored(self, a: Any) -> None:
        x, plan = a["kv"], a["plan"]
        assert a["bf16_store"] and a["page_size"] == 1 and a["kvcache"].stride() == (2 * _D, 1)
        x = x * (x.square().mean(-1, keepdim=True) + a["norm_eps"]).rsqrt() * a["norm_weight"]
        first = torch.tensor([plan.tokens[t][1] - plan.ratio + 1 for t in plan.ends], dtype=torch.long)
        turned = torch.view_as_complex(x[:, -_R:].unflatten(1, (-1, 2)).contiguous()) * a["freq_cis"][first]
        x = torch.cat((x[:, :-_R], torch.view_as_real(turned).flatten(1)), dim=1)
        a["kvcache"].view(torch.bfloat16)[a["out_loc"][plan.ends]] = x.bfloat16()


_DIMS = "dims=448-64-512-512;"
_CASES = (
    f"compress_keys:call=compress;{_DIMS}q=[19,8];kv=[0,0];layers=2;overlap=1;pad=2",
    f"compress_continued:call=compress;{_DIMS}q=[1,1,1];kv=[7,4,3];overlap=1",
    f"compress_continued:call=compress;{_DIMS}q=[5,0,12,1];kv=[3,9,0,7];layers=2;overlap=1;state_page=8;chunk=3",
    f"compress_continued:call=compress;{_DIMS}q=[1,2];kv=[127,126];ratio=128;state_page=8",
    f"compress_continued:call=compress;{_DIMS}q=[1,140,3];kv=[383,5,2];ratio=128;state_page=3;layers=2",
)


def test_entries_are_those_of_the_states(recorded: Any, installed: Any, passes: Any) -> None:
    installed("sglang.kernels.ops.attention.dsv4.compress", **vars(Library(recorded)))
    passes("SGLANG_COMPRESS", roles.Role.COMPRESS, *_CASES)
