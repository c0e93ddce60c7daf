"""A wrong result of FLASH_ATTN_MLA[vllm], vllm 0.33.0, torch 2.11.0.
Case decode:heads=128;q=[1,1];kv=[130,40];page=64;lse=0
decode: output is nan at request 0, query 0, head 0, column 0; 2 of 2 rows hold nothing but NaN (SPEC 1.6)
Exported by mla-conformance 2026.4.0 on NVIDIA H200, torch 2.11.0+cu130.
Exit status: 1 while a number is wrong, 0 if all are right, 2 if this machine cannot decide.
"""
import sys
from itertools import pairwise

try:
    import torch

    if not torch.cuda.is_available():
        raise ImportError("torch finds no GPU")
    import vllm.vllm_flash_attn.flash_attn_interface as flash_attn_interface
except ImportError as error:
    print(f"cannot be decided here: {error} (needs torch, vllm)")
    sys.exit(2)

DEVICE, SCALE, CAUSAL = "cuda", 0.11474836600143812, True
QUERIES = [0, 1, 2]
KEYS = [0, 131, 172]


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


generator = torch.Generator().manual_seed(49963792758651944)
latents = torch.randn(172, 576, generator=generator).to(torch.bfloat16)
queries = torch.randn(2, 128, 576, generator=generator).to(torch.bfloat16)
block_table = torch.tensor([[5, 1, 6, 4, 3], [4, 6, 4, 3, 7]], dtype=torch.int32)
kv_cache = torch.full((8, 64, 576), float("nan"), dtype=torch.bfloat16)
for request, (start, stop) in enumerate(pairwise(KEYS)):
    token = torch.arange(stop - start)
    block = block_table[request, token // 64].long()
    kv_cache.view(torch.uint8)[block, token % 64] = latents[start:stop].view(torch.uint8)
block_table = block_table.to(DEVICE)
ql_nope, q_pe = queries[..., :512], queries[..., 512:]
seq_lens = torch.tensor([131, 41], dtype=torch.int32, device=DEVICE)
query_start_loc = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
ql_nope = laid_out(ql_nope, 131072, (512, 1024, 1), 0)
q_pe = laid_out(q_pe, 49152, (24576, 192, 1), 128)
kv_cache = kv_cache.to(DEVICE)

x1 = kv_cache.unsqueeze(2)
output, x2 = flash_attn_interface.flash_attn_varlen_func(q_pe, x1[..., 512:], x1[..., :512], q_v=ql_nope,
    seqused_k=seq_lens, block_table=block_table, cu_seqlens_q=query_start_loc, max_seqlen_q=1, max_seqlen_k=131,
    softmax_scale=0.11474836600143812, causal=True, return_softmax_lse=True, fa_version=3)
x3 = (seq_lens == 0).repeat_interleave(query_start_loc.diff(), output_size=2)
output.masked_fill_(x3[:, None, None], 0.0)
lse = x2.masked_fill(x3, float("-inf"))

wrong, rows, golden = False, [], []
for request, ((a, b), (c, d)) in enumerate(zip(pairwise(QUERIES), pairwise(KEYS))):
    rows += range(a, b)
    golden.append(reference(queries[a:b].to(DEVICE), key := latents[c:d, None].to(DEVICE).double(), key[..., :512]))
of_output = [torch.cat([part[i] for part, _ in golden]) for i in (0, 1)]
wrong |= compare("output", ("row", "head", "column"), output[rows], *of_output)
print("WRONG" if wrong else "right")
sys.exit(int(wrong))
