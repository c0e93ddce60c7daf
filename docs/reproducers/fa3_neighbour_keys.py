"""A wrong result of FLASH_ATTN[fa3], fa3-fwd 0.0.3, torch 2.11.0.
Case neighbour_keys:heads=2;q=[5,130,1,64]
beside request 1, whose keys and values hold infinities: new tokens: output is nan at request 0, query 0, head 0,
column 0; 5 of 200 rows hold nothing but NaN (SPEC 1.6)
Exported by mla-conformance 2026.4.0 on NVIDIA H200, torch 2.11.0+cu130.
Exit status: 1 while a number is wrong, 0 if all are right, 2 if this machine cannot decide.
"""
import sys
from itertools import pairwise

try:
    import torch

    if not torch.cuda.is_available():
        raise ImportError("torch finds no GPU")
    import fa3_fwd_interface
except ImportError as error:
    print(f"cannot be decided here: {error} (needs torch, fa3-fwd)")
    sys.exit(2)

DEVICE, SCALE, CAUSAL = "cuda", 0.11474836600143812, True
QUERIES = [0, 5, 135, 136, 200]
KEYS = [0, 5, 135, 136, 200]
UNJUDGED = [1]  # requests whose inputs are no numbers, so that theirs alone need not be right


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


generator = torch.Generator().manual_seed(135591339650242)
k = torch.randn(200, 2, 192, generator=generator).to(torch.bfloat16)
v = torch.randn(200, 2, 128, generator=generator).to(torch.bfloat16)
q = torch.randn(200, 2, 192, generator=generator).to(torch.bfloat16)
k[5:135] = float("inf")
v[5:135] = float("inf")
query_start_loc = torch.tensor([0, 5, 135, 136, 200], dtype=torch.int32, device=DEVICE)
q = q.to(DEVICE)
k = k.to(DEVICE)
v = laid_out(v, 102400, (512, 256, 1), 128)

output, lse = fa3_fwd_interface.flash_attn_varlen_func(q, k, v, cu_seqlens_q=query_start_loc,
    cu_seqlens_k=query_start_loc, max_seqlen_q=130, max_seqlen_k=130, softmax_scale=0.11474836600143812,
    causal=True, return_attn_probs=True)

wrong, rows, golden = False, [], []
for request, ((a, b), (c, d)) in enumerate(zip(pairwise(QUERIES), pairwise(KEYS))):
    if request in UNJUDGED:
        continue
    rows += range(a, b)
    golden.append(reference(q[a:b], k[c:d], v[c:d]))
of_lse = [torch.cat([part[i] for _, part in golden], -1) for i in (0, 1)]
wrong |= compare("LSE", ("head", "row"), lse[:, rows], *of_lse)
of_output = [torch.cat([part[i] for part, _ in golden]) for i in (0, 1)]
wrong |= compare("output", ("row", "head", "column"), output[rows], *of_output)
print("WRONG" if wrong else "right")
sys.exit(int(wrong))
