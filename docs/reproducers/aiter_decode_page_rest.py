"""A wrong result of AITER_TRITON_MLA, amd-aiter at e4048607.
Case decode:q=[1,1,1];kv=[0,0,63];page=64;lse=0
decode: output is nan at request 0, query 0, head 0, column 0; 2 of 3 rows hold nothing but NaN (SPEC 1.6)
The kernel reads whole pages. The weight of what stands behind a request's last key is 0, and 0 times NaN is NaN.
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
PAGE, HEADS, RANK, WIDTH, SCALE = 64, 4, 512, 576, 0.11474836600143812
LENGTHS = [1, 1, 64]


class Launched:  # without an option that Triton knows for AMD's GPUs alone
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda waves_per_eu, **given: self.kernel[grid](**given)


if torch.version.hip is None:
    mla.triton_mla_decode_fwd_reduce_kernel = Launched(mla.triton_mla_decode_fwd_reduce_kernel)
if not GPU:
    mla.get_num_sms = lambda: 1

generator = torch.Generator().manual_seed(0)
latents = torch.randn(len(LENGTHS), PAGE, WIDTH, generator=generator).to(DEVICE, DTYPE)
q = torch.randn(len(LENGTHS), HEADS, WIDTH, generator=generator).to(DEVICE, DTYPE)
seen = torch.arange(PAGE, device=DEVICE) < torch.tensor(LENGTHS, device=DEVICE)[:, None]


def decoded(behind):  # one page a request, which holds this value behind the last key
    cache = latents.masked_fill(~seen[..., None], behind)
    output = q.new_empty(len(LENGTHS), HEADS, RANK)
    mla.mla_decode_fwd(q=q, kv_buffer=cache.unsqueeze(2), out=output,
        cu_seqlens_q=torch.arange(len(LENGTHS) + 1, dtype=torch.int32, device=DEVICE),
        seqused_k=torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE), max_seqlen_kv=max(LENGTHS),
        block_tables=torch.arange(len(LENGTHS), dtype=torch.int32, device=DEVICE)[:, None], softmax_scale=SCALE,
        kv_lora_rank=RANK, qk_rope_head_dim=WIDTH - RANK, causal=True, q_descale=None, kv_descale=None)
    return output


k = latents.double()
scores = SCALE * torch.einsum("tnd,tsd->tns", q.double(), k)
expected = torch.einsum("tns,tsl->tnl", scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1), k[..., :RANK])
wrong = False
for behind in (0.0, float("nan")):
    got = decoded(behind)
    bad = ~((got.double() - expected).abs() <= 0.02 + 0.02 * expected.abs())  # far more than it may round
    rows = bad.flatten(1).any(1).nonzero().flatten().tolist()
    print(f"{behind} behind the last key: {len(rows)} of {len(LENGTHS)} rows wrong{f': {rows}' if rows else ''}")
    for row in rows[:1]:
        print(f"  output at row {row}, head 0, column 0: got {got[row, 0, 0]:.6g}, expected {expected[row, 0, 0]:.6g}")
    wrong |= bool(rows)
print("WRONG" if wrong else "right")
sys.exit(int(wrong))
