"""A wrong result of SGLANG_TRITON, sglang 0.5.23, triton 3.6.0.
Case decode_lse:call=decode;heads=1;q=[1x8];kv=[0,5,40,64,0,9,17,300];page=64
decode: LSE is 5.183438 at request 5, query 0, head 0, expected 5.188876: 60 × its error budget, wrong in 8 of 8
requests, 8 of 8 rows, 1 of 1 heads (SPEC 4.2)
Exported by mla-conformance 2026.4.0 on NVIDIA H200, torch 2.11.0+cu130.
Exit status: 1 while a number is wrong, 0 if all are right, 2 if this machine cannot decide.
"""
import sys
from itertools import pairwise

try:
    import torch

    if not torch.cuda.is_available():
        raise ImportError("torch finds no GPU")
    import sglang.kernels.ops.attention.metadata as metadata
    import sglang.kernels.ops.attention.decode_attention as decode_attention
except ImportError as error:
    print(f"cannot be decided here: {error} (needs torch, sglang, triton)")
    sys.exit(2)

DEVICE, SCALE, CAUSAL = "cuda", 0.11474836600143812, True
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


generator = torch.Generator().manual_seed(62870538690226580)
latents = torch.randn(443, 576, generator=generator).to(torch.bfloat16)
queries = torch.randn(8, 1, 576, generator=generator).to(torch.bfloat16)
block_table = torch.tensor(
    [[13, 11, 10, 7, 12, 9, 14], [11, 10, 7, 12, 9, 14, 6], [10, 7, 12, 9, 14, 6, 3], [7, 12, 9, 14, 6, 3, 15],
        [9, 9, 14, 6, 3, 15, 16], [14, 14, 6, 3, 15, 16, 1], [6, 6, 3, 15, 16, 1, 5], [3, 15, 16, 1, 5, 5, 4]],
    dtype=torch.int32)
kv_cache = torch.full((17, 64, 576), float("nan"), dtype=torch.bfloat16)
for request, (start, stop) in enumerate(pairwise(KEYS)):
    token = torch.arange(stop - start)
    block = block_table[request, token // 64].long()
    kv_cache.view(torch.uint8)[block, token % 64] = latents[start:stop].view(torch.uint8)
block_table = block_table.to(DEVICE)
ql_nope, q_pe = queries[..., :512], queries[..., 512:]
seq_lens = torch.tensor([1, 6, 41, 65, 1, 10, 18, 301], dtype=torch.int32, device=DEVICE)
query_start_loc = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.int32, device=DEVICE)
ql_nope = ql_nope.contiguous().to(DEVICE)
q_pe = laid_out(q_pe, 1536, (192, 192, 1), 128)
kv_cache = kv_cache.to(DEVICE)

x1 = torch.cat([ql_nope, q_pe], dim=-1)
x2 = kv_cache.flatten(0, 1).unsqueeze(1)
x3 = torch.arange(448, device=DEVICE)
x4 = ((block_table.long()[:, (x3 // 64)] * 64) + (x3 % 64))
x5 = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0))
x6 = x4.new_zeros(3585)
x7 = torch.where((x3 < seq_lens[:, None]), (x5[:-1, None] + x3), 3584).flatten()
x6.scatter_(0, x7, x4.flatten())
x8 = x5.int()
x9 = torch.full_like(seq_lens, 8)
x10 = metadata.get_num_kv_splits_triton[(1,)](x9, seq_lens.clamp(min=1), 8, 1, 1, 1, 16, 132, MAX_NUM_SEQ=256)
output = x1.new_empty((8, 1, 512))
x11 = x1.new_full((8, 1, 16), float("-inf"), dtype=torch.float32)
decode_attention.decode_attention_fwd(x1, x2, x2[..., :512], output, x8, x6,
    x1.new_empty(8, 1, 16, 512, dtype=torch.float32), x11, x9, 16, 0.11474836600143812, 1.0, 1.0, has_mla=True)
x12 = x11.logsumexp(-1).mT
x13 = (seq_lens == 0).repeat_interleave(query_start_loc.diff(), output_size=8)
output.masked_fill_(x13[:, None, None], 0.0)
lse = x12.masked_fill(x13, float("-inf"))

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
