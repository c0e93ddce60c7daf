"""A wrong result of SGLANG_TRITON[interpreted], sglang 0.5.23, triton 3.7.1.
Case decode_lse:call=decode;dtype=fp16;heads=1;q=[1x8];kv=[0,5,40,64,0,9,17,300];page=64
decode: LSE is 6.125788 at request 6, query 0, head 0, expected 6.127032: 12.6 × its error budget, wrong in 7 of 8
requests, 7 of 8 rows, 1 of 1 heads (SPEC 4.2)
Exported by mla-conformance 2026.3.0 on cpu, torch 2.13.0+cpu.
Exit status: 1 while a number is wrong, 0 if all are right, 2 if this machine cannot decide.
"""
import os
import sys
from itertools import pairwise

try:
    os.environ.update({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})  # before it is imported
    import torch
    import sglang.kernels.ops.attention.decode_attention as decode_attention
except ImportError as error:
    print(f"cannot be decided here: {error} (needs torch, sglang, triton)")
    sys.exit(2)

DEVICE, SCALE, CAUSAL = "cpu", 0.11474836600143812, True
QUERIES = [0, 1, 2, 3, 4, 5, 6, 7, 8]
KEYS = [0, 1, 7, 48, 113, 114, 124, 142, 443]


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
        0.000490188599 * a + 1.90734863e-06 * e + 0.00048828125 * output.abs() + 2.98023224e-08 * peak +
        2.98023224e-08
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


generator = torch.Generator().manual_seed(62870538690226580)
latents = torch.randn(443, 576, generator=generator).to(torch.float16)
queries = torch.randn(8, 1, 576, generator=generator).to(torch.float16)
block_table = torch.tensor(
    [[13, 11, 10, 7, 12, 9, 14], [11, 10, 7, 12, 9, 14, 6], [10, 7, 12, 9, 14, 6, 3], [7, 12, 9, 14, 6, 3, 15],
        [9, 9, 14, 6, 3, 15, 16], [14, 14, 6, 3, 15, 16, 1], [6, 6, 3, 15, 16, 1, 5], [3, 15, 16, 1, 5, 5, 4]],
    dtype=torch.int32)
kv_cache = torch.full((17, 64, 576), float("nan"), dtype=torch.float16)
for request, (start, stop) in enumerate(pairwise(KEYS)):
    token = torch.arange(stop - start)
    block = block_table[request, token // 64].long()
    kv_cache.view(torch.uint8)[block, token % 64] = latents[start:stop].view(torch.uint8)
block_table = block_table.to(DEVICE)
ql_nope, q_pe = queries[..., :512], queries[..., 512:]
seq_lens = torch.tensor([1, 6, 41, 65, 1, 10, 18, 301], dtype=torch.int32)
query_start_loc = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.int32)
ql_nope = ql_nope.contiguous().to(DEVICE)
q_pe = laid_out(q_pe, 1536, (192, 192, 1), 128)
kv_cache = kv_cache.to(DEVICE)

x1 = torch.cat([ql_nope, q_pe], dim=-1)
x2 = kv_cache.flatten(0, 1).unsqueeze(1)
x3 = torch.arange(448, device="cpu")
x4 = ((block_table.long()[:, (x3 // 64)] * 64) + (x3 % 64))
x5 = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0))
x6 = x4.new_zeros(3585)
x7 = torch.where((x3 < seq_lens[:, None]), (x5[:-1, None] + x3), 3584).flatten()
x6.scatter_(0, x7, x4.flatten())
output = x1.new_empty((8, 1, 512))
x8 = x1.new_full((8, 1, 8), float("-inf"), dtype=torch.float32)
decode_attention.decode_attention_fwd(x1, x2, x2[..., :512], output, x5.int(), x6,
    x1.new_empty(8, 1, 8, 512, dtype=torch.float32), x8, torch.full_like(seq_lens, 8), 8, 0.11474836600143812,
    1.0, 1.0, has_mla=True)
x9 = x8.logsumexp(-1).mT
x10 = (seq_lens == 0).repeat_interleave(query_start_loc.diff(), output_size=8)
output.masked_fill_(x10[:, None, None], 0.0)
lse = x9.masked_fill(x10, float("-inf"))

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
