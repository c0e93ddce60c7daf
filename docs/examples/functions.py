"""Right and slow kernels in plain torch, one for each role, that docs/python-api.md shows: put yours in their place."""

import torch


def attend(q, k, v, scale, first):
    """Output [T, N, V] and LSE [N, T]: query t sees the keys below first + t."""
    scores = torch.einsum("tnd,snd->nts", q.float(), k.float().expand(-1, q.shape[1], -1)) * scale
    seen = torch.arange(len(k), device=q.device) < first + torch.arange(len(q), device=q.device)[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(dim=-1).nan_to_num()  # a row that sees no key is 0
    return torch.einsum("nts,snv->tnv", weights, v.float().expand(-1, q.shape[1], -1)), scores.logsumexp(dim=-1)


def prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal, **_):
    output = q.new_zeros(len(q), q.shape[1], v.shape[2])
    lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=torch.float32)
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(queries) - 1):
        rows, seen = slice(*queries[b : b + 2]), slice(*keys[b : b + 2])
        length = seen.stop - seen.start
        first = length - (rows.stop - rows.start) + 1 if causal else length
        output[rows], lse[:, rows] = attend(q[rows], k[seen], v[seen], scale, first)
    return output, lse


def decode(q, kv_cache, block_table, seq_lens, cu_seqlens_q, scale, kv_lora_rank, kv_cache_dtype, k_scale, **_):
    output = q.new_zeros(len(q), q.shape[1], kv_lora_rank)
    lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=torch.float32)
    page, starts = kv_cache.shape[1], cu_seqlens_q.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        rows, token = slice(*starts[b : b + 2]), torch.arange(length, device=q.device)
        entries = kv_cache[block_table[b, token // page].long(), token % page].float()
        k = (entries * k_scale if kv_cache_dtype == "fp8" else entries).unsqueeze(1)
        first = length - (rows.stop - rows.start) + 1
        output[rows], lse[:, rows] = attend(q[rows], k, k[..., :kv_lora_rank], scale, first)
    return output, lse


def sparse(q, topk_indices, scale, kv_lora_rank, kv_cache=None, kv=None, **_):
    output = q.new_zeros(len(q), q.shape[1], kv_lora_rank)
    lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=torch.float32)
    stored = (kv_cache if kv is None else kv).flatten(0, 1)  # slot = block * page + offset, or a row of kv
    for t, named in enumerate(topk_indices.long()):
        k = stored[named[named >= 0]].unsqueeze(1)
        output[t : t + 1], lse[:, t : t + 1] = attend(q[t : t + 1], k, k[..., :kv_lora_rank], scale, len(k))
    return output, lse


def top_k(q, weights, k, block_table, seq_lens, cu_seqlens_q, topk_tokens, **_):
    blocks, page, width = k.shape  # uint8: the codes of a page's tokens, then a float32 scale for each
    codes, scales = (part.contiguous() for part in k.flatten(1).split([page * (width - 4), page * 4], dim=1))
    keys = codes.view(torch.float8_e4m3fn).float().view(blocks, page, -1) * scales.view(torch.float32)[..., None]
    best = torch.full((len(q), topk_tokens), -1, dtype=torch.int32, device=q.device)
    starts = cu_seqlens_q.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        for t in range(*starts[b : b + 2]):
            token = torch.arange(max(0, length - (starts[b + 1] - 1 - t)), device=q.device)  # up to the query's own
            own = keys[block_table[b, token // page].long(), token % page]
            scores = weights[t] @ (q[t].float() @ own.mT).relu()
            found = scores.topk(min(topk_tokens, len(token))).indices
            best[t, : len(found)] = found.int()
    return best
