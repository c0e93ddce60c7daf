"""A wrong result of TRITON_MLA, vllm 0.33.0, triton 3.6.0.
Case decode_lse:call=decode;q=[1x4];kv=[64,9,1000,17];page=64
decode: LSE is 11.3125 at request 2, query 0, head 1, expected 11.33483: 215 × its error budget, wrong in 4 of 4
requests, 4 of 4 rows, 4 of 4 heads (SPEC 4.2)
Exported by mla-conformance 2026.4.0 on NVIDIA H200, torch 2.11.0+cu130.
Exit status: 1 while a number is wrong, 0 if all are right, 2 if this machine cannot decide.
"""
import sys
from itertools import pairwise

try:
    import torch

    if not torch.cuda.is_available():
        raise ImportError("torch finds no GPU")
    import vllm.v1.attention.ops.triton_decode_attention as triton_decode_attention
except ImportError as error:
    print(f"cannot be decided here: {error} (needs torch, vllm, triton)")
    sys.exit(2)

DEVICE, SCALE, CAUSAL = "cuda", 0.11474836600143812, True
QUERIES = [0, 1, 2, 3, 4]
KEYS = [0, 65, 75, 1076, 1094]


def laid_out(x, size, stride, offset):  # the same values in a memory layout
    storage = torch.full((size,), float("nan"), dtype=x.dtype, device=DEVICE)
    return storage.as_strided(x.shape, stride, offset).copy_(x)


def reference(q, k, v):  # of one request in float64: q [T, N, D], k [S, 1 or N, D], v [S, 1 or N, V]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=DEVICE)
    visible = visible.tril(k.shape[1] - q.shape[1]) if CAUSAL else visible
    scores = (SCALE * (q @ k.mT)).masked_fill(~visible, -torch.inf)
    lse, p = scores.logsumexp(-1), scores.softmax(-1).masked_fill(~visible, 0)
    output, sizes = p @ v, p * (abs(SCALE) * (q.abs() @ k.abs().mT))
    # What a kernel that rounds as it says may be off by, at most; the numbers are those of the verdict above.
    a, e, size = p @ v.abs(), sizes @ v.abs(), sizes.sum(-1)
    peak = (p.amax(-1, keepdim=True) if p.shape[-1] else 0) * (visible.double() @ v.abs())
    budget = (
        0.00390815735 * a + 1.90734863e-06 * e + 0.00390625 * output.abs() + 4.59177481e-41 * peak +
        4.59177481e-41
    )
    lse_budget = 1.90734863e-06 * (size + lse.abs() + 1)
    seen = visible.any(-1)  # a row without keys must be 0 and -inf
    return [x.transpose(0, 1) for x in (output, budget * seen[:, None])], [lse, lse_budget * seen]


def compare(name, places, got, want, budget):
    error = torch.where(got == want, 0, (got.double() - want).abs())
    share = torch.where(error == 0, 0, error / budget).nan_to_num(torch.inf, torch.inf)
    worst, place = int(share.argmax()), ()
    for size in reversed(share.shape):
        worst, place = worst // size, (worst % size, *place)
    at = ", ".join(f"{name} {rows[i] if name == 'row' else i}" for name, i in zip(places, place))
    got, want, error, budget = (float(x[place]) for x in (got, want, error, budget))
    print(f"{name} at {at}: got {got:.8g}, expected {want:.8g}, error {error:.3g}, budget {budget:.3g}")
    print(f"  {int((share > 1).sum())} of {share.numel()} wrong, the worst {float(share.max()):.3g} times its budget")
    return bool((share > 1).any())


generator = torch.Generator().manual_seed(63799149011443296)
latents = torch.randn(1094, 576, generator=generator).to(torch.bfloat16)
queries = torch.randn(4, 4, 576, generator=generator).to(torch.bfloat16)
block_table = torch.tensor(
    [[20, 9, 17, 4, 16, 21, 23, 15, 5, 8, 7, 14, 10, 11, 2, 13, 6, 18], [17, 17, 4, 16, 21, 23, 15, 5, 8, 7, 14,
        10, 11, 2, 13, 6, 18, 12], [4, 16, 21, 23, 15, 5, 8, 7, 14, 10, 11, 2, 13, 6, 18, 12, 12, 3], [3, 16,
        21, 23, 15, 5, 8, 7, 14, 10, 11, 2, 13, 6, 18, 12, 3, 19]],
    dtype=torch.int32)
kv_cache = torch.full((24, 64, 576), float("nan"), dtype=torch.bfloat16)
for request, (start, stop) in enumerate(pairwise(KEYS)):
    token = torch.arange(stop - start)
    block = block_table[request, token // 64].long()
    kv_cache.view(torch.uint8)[block, token % 64] = latents[start:stop].view(torch.uint8)
block_table = block_table.to(DEVICE)
ql_nope, q_pe = queries[..., :512], queries[..., 512:]
k_scale = torch.tensor(0.013000000268220901, dtype=torch.float32, device=DEVICE)
seq_lens = torch.tensor([65, 10, 1001, 18], dtype=torch.int32, device=DEVICE)
query_start_loc = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32, device=DEVICE)
ql_nope = laid_out(ql_nope, 8192, (512, 2048, 1), 0)
q_pe = laid_out(q_pe, 3072, (768, 192, 1), 128)
kv_cache = kv_cache.to(DEVICE)

x1 = torch.cat([ql_nope, q_pe], dim=-1)
output = x1.new_zeros((4, 4, 512))
x2 = x1.new_zeros((4, 4), dtype=torch.bfloat16)
x3 = kv_cache.unsqueeze(2)
triton_decode_attention.decode_attention_fwd(x1, x3, x3[..., :512], output, x2, block_table, seq_lens,
    x1.new_empty(4, 4, 1, 513, dtype=torch.float32), 1, 0.11474836600143812, 64, k_scale=k_scale,
    v_scale=k_scale, is_mla=True)
x4 = x2.mT.float()
x5 = (seq_lens == 0).repeat_interleave(query_start_loc.diff(), output_size=4)
output.masked_fill_(x5[:, None, None], 0.0)
lse = x4.masked_fill(x5, float("-inf"))

wrong, rows, golden = False, [], []
for request, ((a, b), (c, d)) in enumerate(zip(pairwise(QUERIES), pairwise(KEYS))):
    rows += range(a, b)
    golden.append(reference(queries[a:b].to(DEVICE), key := latents[c:d, None].to(DEVICE).double(), key[..., :512]))
of_lse = [torch.cat([part[i] for _, part in golden], -1) for i in (0, 1)]
wrong |= compare("LSE", ("head", "row"), lse[:, rows], *of_lse)
of_output = [torch.cat([part[i] for part, _ in golden]) for i in (0, 1)]
wrong |= compare("output", ("row", "head", "column"), output[rows], *of_output)
print("WRONG" if wrong else "right")
sys.exit(int(wrong))
