"""A kernel of the role window_decode in plain PyTorch, one request at a time.

mla-conformance certify --role window_decode.py --backend my_window.py:MyWindow --device cpu
"""

import torch
from window_decode import WindowDecodeBackend

from mla_conformance.backends.slots import slots_of


class MyWindow(WindowDecodeBackend):
    @staticmethod
    def get_name():
        return "MY_WINDOW"

    def run_window_decode(self, ql_nope, q_pe, kv_cache, k_scale, window, sink):
        metadata, page = self.metadata, kv_cache.shape[1]
        q, slots = torch.cat((ql_nope, q_pe), dim=-1), slots_of(metadata, page)
        output = torch.zeros_like(ql_nope)
        lse = torch.full((self.num_heads, len(q)), -torch.inf, device=q.device)
        starts = metadata.query_start_loc.tolist()
        for request, length in enumerate(metadata.seq_lens.tolist()):
            rows, seen = slice(*starts[request : request + 2]), slots[request, :length]
            keys = kv_cache[seen // page, seen % page].float()
            output[rows], lse[:, rows] = self.attend(q[rows], keys, window, sink)
        return output, lse

    def attend(self, q, keys, window, sink):
        scores = self.scale * torch.einsum("tnd,sd->nts", q.float(), keys)
        own = torch.arange(len(keys) - len(q), len(keys), device=q.device).unsqueeze(1)
        token = torch.arange(len(keys), device=q.device)
        lse = scores.masked_fill_((token > own) | (token <= own - window), -torch.inf).logsumexp(dim=-1)
        p = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0)  # NaN where a row has no key
        output = torch.einsum("nts,sv->tnv", p, keys[:, : self.kv_lora_rank])
        share = 1.0 if sink is None else torch.sigmoid(lse - sink.unsqueeze(1)).mT.unsqueeze(-1)
        return (share * output).to(q.dtype), lse
