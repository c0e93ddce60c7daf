"""A wrong result of LMDEPLOY_TRITON, lmdeploy 0.18.0.
Case decode:q=[1,1,1];kv=[0,0,63];page=64;lse=0
decode: output is nan at request 0, query 0, head 0, column 0; 2 of 3 rows hold nothing but NaN (SPEC 1.6)
The kernel reads whole pages. The weight of what stands behind a request's last key is 0, and 0 times NaN is NaN.
Without a GPU Triton interprets the kernel, in fp16, since NumPy has no bf16.
Exit status: 1 while a number is wrong, 0 if all are right, 2 if that cannot be told here.
"""
import os
import sys

try:
    import torch

    GPU = torch.cuda.is_available()
    if not GPU:
        os.environ.update({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})  # before it is imported
    import triton.language as tl
    import lmdeploy.pytorch.kernels.cuda.pagedattention as pagedattention
except ImportError as error:
    print(f"cannot be told here: {error} (needs torch, lmdeploy, triton)")
    sys.exit(2)

DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float16)
PAGE, HEADS, RANK, WIDTH, SCALE = 64, 4, 512, 576, 0.11474836600143812
LENGTHS = [1, 1, 64]
if not GPU:  # what it asks a GPU for, and functions that it renames, which the interpreter then misses
    props = {"multi_processor_count": 16, "compute_capability": (9, 0), "warps_per_sm": 64, "blocks_per_sm": 32}
    vars(pagedattention).update(get_device_props=lambda device=None: props, is_cuda=lambda: False,
        tl_exp2=lambda x: tl.exp2(x), tl_log2=lambda x: tl.log2(x))

generator = torch.Generator().manual_seed(0)
latents = torch.randn(len(LENGTHS), PAGE, WIDTH, generator=generator).to(DEVICE, DTYPE)
q = torch.randn(len(LENGTHS), HEADS, WIDTH, generator=generator).to(DEVICE, DTYPE)
lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
seen = torch.arange(PAGE, device=DEVICE) < lengths[:, None]


def decoded(behind):  # one page a request, which holds this value behind the last key
    cache = latents.masked_fill(~seen[..., None], behind).unsqueeze(2)
    table = torch.arange(len(LENGTHS), dtype=torch.int32, device=DEVICE)[:, None]
    return pagedattention.flash_attn_with_kvcache(q, cache, cache[..., :RANK], lengths, table, softmax_scale=SCALE,
        causal=True, quant_policy=pagedattention.QuantPolicy.NONE)


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
