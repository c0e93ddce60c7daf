"""A wrong result of FLASHINFER_MLA[fa3], flashinfer-python 0.7.2.post1, apache-tvm-ffi 0.1.15.post2.
Case refusals:call=decode;heads=2;q=[1];kv=[40];page=64;cache=fp8
decode: LSE is 7.104266 at request 0, query 0, head 0, expected 7.106199: 20.1 × its error budget, wrong in 1 of 1
requests, 1 of 1 rows, 2 of 2 heads (SPEC 4.2)
Exported by mla-conformance 2026.4.0 on NVIDIA H200, torch 2.11.0+cu130.
Exit status: 1 while a number is wrong, 0 if all are right, 2 if this machine cannot decide.
"""
import sys
from itertools import pairwise

try:
    import torch

    if not torch.cuda.is_available():
        raise ImportError("torch finds no GPU")
    import flashinfer.mla as mla
except ImportError as error:
    print(f"cannot be decided here: {error} (needs torch, flashinfer-python, apache-tvm-ffi)")
    sys.exit(2)

DEVICE, SCALE, CAUSAL = "cuda", 0.11474836600143812, True
QUERIES = [0, 1]
KEYS = [0, 41]


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
        0.00781440735 * a + 1.90734863e-06 * e + 0.00390625 * output.abs() + 4.59177481e-41 * peak +
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


generator = torch.Generator().manual_seed(6310107187527722)
latents = torch.randn(41, 576, generator=generator).to(torch.bfloat16)
latents = (latents.double() / 0.013000000268220901).clamp(-448, 448).to(torch.float8_e4m3fn)  # codes
queries = torch.randn(1, 2, 576, generator=generator).to(torch.bfloat16)
block_table = torch.tensor([[1, 2, 4]], dtype=torch.int32)
kv_cache = torch.full((5, 64, 576), float("nan"), dtype=torch.float8_e4m3fn)
for request, (start, stop) in enumerate(pairwise(KEYS)):
    token = torch.arange(stop - start)
    block = block_table[request, token // 64].long()
    kv_cache.view(torch.uint8)[block, token % 64] = latents[start:stop].view(torch.uint8)
block_table = block_table.to(DEVICE)
ql_nope, q_pe = queries[..., :512], queries[..., 512:]
seq_lens = torch.tensor([41], dtype=torch.int32, device=DEVICE)
query_start_loc = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
query_lens_cpu = torch.tensor([1], dtype=torch.int32)
seq_lens_cpu = torch.tensor([41], dtype=torch.int32)
ql_nope = ql_nope.contiguous().to(DEVICE)
q_pe = laid_out(q_pe, 384, (384, 192, 1), 128)
kv_cache = kv_cache.to(DEVICE)

x1 = mla.BatchMLAPagedAttentionWrapper(torch.empty(134217728, dtype=torch.uint8, device=DEVICE),
    use_cuda_graph=True, qo_indptr=torch.zeros(2, dtype=torch.int32, device=DEVICE),
    kv_indptr=torch.zeros(2, dtype=torch.int32, device=DEVICE),
    kv_indices=torch.zeros(3, dtype=torch.int32, device=DEVICE),
    kv_len_arr=torch.zeros(1, dtype=torch.int32, device=DEVICE), backend="fa3")
x2 = ((seq_lens_cpu + 63) // 64)
x3 = mla.MLAPlanMetadata.csr(qo_indptr=torch.nn.functional.pad(query_lens_cpu.cumsum(0), (1, 0)).int(),
    kv_indptr=torch.nn.functional.pad(x2.cumsum(0), (1, 0)).int(),
    kv_indices=block_table[(torch.arange(3) < x2[:, None]).to(DEVICE)], kv_len_arr=seq_lens_cpu)
x1.plan(metadata=x3, query_layout="split", kv_cache_layout="split", lse_mode="basee",
    scale_mode="kv-per-tensor", num_heads=2, head_dim_ckv=512, head_dim_kpe=64, page_size=64, causal=False,
    sm_scale=0.11474836600143812, q_data_type=torch.bfloat16, kv_data_type=torch.float8_e4m3fn)
output, x4 = x1.run(query=(ql_nope, q_pe), kv_cache=(kv_cache[..., :512], kv_cache[..., 512:]), return_lse=True,
    return_lse_base_on_e=True, ckv_scale=0.013000000268220901, kpe_scale=0.013000000268220901)
x5 = x4.mT
x6 = (seq_lens == 0).repeat_interleave(query_start_loc.diff(), output_size=1)
output.masked_fill_(x6[:, None, None], 0.0)
lse = x5.masked_fill(x6, float("-inf"))

wrong, rows, golden = False, [], []
for request, ((a, b), (c, d)) in enumerate(zip(pairwise(QUERIES), pairwise(KEYS))):
    rows += range(a, b)
    golden.append(reference(queries[a:b].to(DEVICE), key := latents[c:d, None].to(DEVICE).double() * 0.013000000268220901, key[..., :512]))
of_lse = [torch.cat([part[i] for _, part in golden], -1) for i in (0, 1)]
wrong |= compare("LSE", ("head", "row"), lse[:, rows], *of_lse)
of_output = [torch.cat([part[i] for part, _ in golden]) for i in (0, 1)]
wrong |= compare("output", ("row", "head", "column"), output[rows], *of_output)
print("WRONG" if wrong else "right")
sys.exit(int(wrong))
