"""A wrong result of AITER_TRITON_SPARSE, amd-aiter at e4048607.
Case sparse_decode:heads=16;q=[1];kv=[20];data=negative;lse=0;topk=48;holes=front
sparse decode: output is nan at request 0, query 0, head 0, column 0; 1 of 1 rows hold nothing but NaN (SPEC 1.6)
Where the first tile of a list names no key, the row's running maximum becomes 0. Where all its logits are far below 0,
the weights of its keys vanish beside that, and their sum, 0, divides.
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
    import aiter.ops.triton.attention.unified_attention_sparse_mla as sparse
except ImportError as error:
    print(f"cannot be told here: {error} (needs torch, amd-aiter, triton)")
    sys.exit(2)

DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float16)
PAGE, HEADS, RANK, WIDTH, SCALE = 16, 16, 512, 576, 0.11474836600143812
KEYS, COLUMNS = 21, 48  # so the first of three tiles names no key, where holes stand in front

generator = torch.Generator().manual_seed(0)
latents = torch.randn(2 * PAGE, WIDTH, generator=generator).to(DEVICE, DTYPE)
query = torch.randn(1, HEADS, WIDTH, generator=generator).to(DEVICE, DTYPE)
named = torch.arange(KEYS, dtype=torch.int32, device=DEVICE)
holes = named.new_full((COLUMNS - KEYS,), -1)


def selected(q, cache, indices):
    output = q.new_empty(1, HEADS, RANK)
    sparse.unified_attention_sparse_mla(q=q, kv=cache.view(-1, PAGE, 1, WIDTH), out=output,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE), max_seqlen_q=1,
        seqused_k=torch.tensor([KEYS], dtype=torch.int32, device=DEVICE), max_seqlen_k=KEYS, softmax_scale=SCALE,
        topk_indices=indices[None], block_table=torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE),
        kv_lora_rank=RANK)
    return output


wrong = False
for column in (0.0, 50.0):  # of the rotated part; it moves every logit of a row alike
    q, k = query.clone(), latents.clone()
    q[..., -1], k[..., -1] = column, -column
    p = (SCALE * torch.einsum("tnd,sd->tns", q.double(), k[:KEYS].double())).softmax(-1)
    expected = torch.einsum("tns,sl->tnl", p, k[:KEYS, :RANK].double())
    for place, parts in (("behind", (named, holes)), ("in front", (holes, named))):
        got = selected(q, k, torch.cat(parts))
        bad = ~((got.double() - expected).abs() <= 0.02 + 0.02 * expected.abs())  # far more than it may round
        print(f"logits near {0 - SCALE * column**2:.0f}, holes {place}: {int(bad.sum())} of {bad.numel()} wrong")
        if bad.any():
            print(f"  output at head 0, column 0: got {got[0, 0, 0]:.6g}, expected {expected[0, 0, 0]:.6g}")
        wrong |= bool(bad.any())
print("WRONG" if wrong else "right")
sys.exit(int(wrong))
