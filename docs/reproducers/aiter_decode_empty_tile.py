"""A wrong result of AITER_TRITON_MLA, amd-aiter at e4048607.
Case decode_multi_token:call=decode;q=[2,2];kv=[63,31];page=32;data=negative;lse=0
decode: output is 0 at request 0, query 0, head 0, column 0; wrong in 2 of 4 rows (SPEC 4.2)
A tile without a key that a row may see sets the row's running maximum to 0. Where all its logits are far below 0, the
weights of its keys vanish beside that. Zeros stand behind the last keys, so that the kernel's other mistake, of a
page's rest, does not show.
Without a GPU Triton interprets the kernel, in fp16, since NumPy has no bf16.
Exit status: 1 while a number is wrong, 0 if all are right, 2 if that cannot be told here.
"""
import os
import sys
from types import SimpleNamespace

os.environ["AITER_TRITON_ONLY"] = "1"  # its operators in C++ are not built
try:
    import torch

    GPU = torch.cuda.is_available()
    if not GPU:
        os.environ.update({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})  # before it is imported
        import triton.experimental.gluon
        from triton.runtime import driver

        driver.set_active(SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch="")))
    import aiter.ops.triton.attention.mla as mla
except ImportError as error:
    print(f"cannot be told here: {error} (needs torch, amd-aiter, triton)")
    sys.exit(2)

DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float16)
PAGE, PAGES, HEADS, RANK, WIDTH, SCALE = 32, 3, 4, 512, 576, 0.11474836600143812
QUERIES, LENGTHS = 2, [65, 33]  # the first query token of each request sees whole pages, and none of the next one


class Launched:  # without an option that Triton knows for AMD's GPUs alone
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda waves_per_eu, **given: self.kernel[grid](**given)


if torch.version.hip is None:
    mla.triton_mla_decode_fwd_reduce_kernel = Launched(mla.triton_mla_decode_fwd_reduce_kernel)
if not GPU:
    mla.get_num_sms = lambda: 1

generator, requests = torch.Generator().manual_seed(0), len(LENGTHS)
latents = torch.randn(requests, PAGES * PAGE, WIDTH, generator=generator).to(DEVICE, DTYPE)
queries = torch.randn(requests, QUERIES, HEADS, WIDTH, generator=generator).to(DEVICE, DTYPE)
token = torch.arange(PAGES * PAGE, device=DEVICE)
last = torch.tensor(LENGTHS, device=DEVICE)[:, None] - QUERIES + torch.arange(QUERIES, device=DEVICE)
latents.masked_fill_((token > last[:, -1:])[..., None], 0.0)


def decoded(q, cache):
    output = q.new_empty(requests * QUERIES, HEADS, RANK)
    mla.mla_decode_fwd(q=q.flatten(0, 1), kv_buffer=cache.view(-1, PAGE, 1, WIDTH), out=output,
        cu_seqlens_q=torch.arange(0, requests * QUERIES + 1, QUERIES, dtype=torch.int32, device=DEVICE),
        seqused_k=torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE), max_seqlen_kv=max(LENGTHS),
        block_tables=torch.arange(requests * PAGES, dtype=torch.int32, device=DEVICE).view(requests, PAGES),
        softmax_scale=SCALE, kv_lora_rank=RANK, qk_rope_head_dim=WIDTH - RANK, causal=True, q_descale=None,
        kv_descale=None)
    return output


wrong = False
for column in (0.0, 50.0):  # of the rotated part; it moves every logit of a row alike
    q, k = queries.clone(), latents.clone()
    q[..., -1], k[..., -1] = column, -column
    scores = SCALE * torch.einsum("rtnd,rsd->rtns", q.double(), k.double())
    p = scores.masked_fill((token > last[..., None])[:, :, None], -torch.inf).softmax(-1)
    expected, got = torch.einsum("rtns,rsl->rtnl", p, k[..., :RANK].double()).flatten(0, 1), decoded(q, k)
    bad = ~((got.double() - expected).abs() <= 0.02 + 0.02 * expected.abs())  # far more than it may round
    rows = bad.flatten(1).any(1).nonzero().flatten().tolist()
    told = f": {rows}" if rows else ""
    print(f"logits near {0 - SCALE * column**2:.0f}: {len(rows)} of {requests * QUERIES} rows wrong{told}")
    for row in rows[:1]:
        print(f"  output at row {row}, head 0, column 0: got {got[row, 0, 0]:.6g}, expected {expected[row, 0, 0]:.6g}")
    wrong |= bool(rows)
print("WRONG" if wrong else "right")
sys.exit(int(wrong))
