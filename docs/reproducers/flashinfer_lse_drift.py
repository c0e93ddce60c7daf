"""A wrong LSE of FLASHINFER[fa2], flashinfer-python 0.7.2.post1.
Case combinations:call=context_chunk;heads=56;q=[30,15,213,6];kv=[94,2,106071,151];scale=100;data=negative
context chunk 0: LSE is -11534.37 at request 2, query 210, head 7, expected -11534.98: 2.08 × its error budget; the
output is right (SPEC 4.2)
Where all logits lie far from 0, m · scale does not fit float32. After each tile of 128 keys the sums are multiplied by
2^(m_prev · scale - m · scale), of which one product is rounded and the other is not, if the compiler joins it with the
subtraction: for a maximum that has not changed that is not 1, and the error compounds with the tiles.
Exit status: 1 while a number is wrong, 0 if all are right, 2 if that cannot be told here.
"""
import math
import sys

try:
    import torch

    if not torch.cuda.is_available():
        raise ImportError("torch finds no GPU")
    import flashinfer
except ImportError as error:
    print(f"cannot be told here: {error} (needs torch, flashinfer-python, apache-tvm-ffi)")
    sys.exit(2)

DEVICE, QUERIES, HEADS, SCALE, MOST = "cuda", 213, 56, 192**-0.5, 0.05
space = torch.empty(2**29, dtype=torch.uint8, device=DEVICE)
wrong = False
for offset in (0, 400):
    for keys in (1000, 16449, 106071):
        generator = torch.Generator(device=DEVICE).manual_seed(keys)
        q, k, v = (
            torch.randn(rows, HEADS, width, device=DEVICE, generator=generator).bfloat16()
            for rows, width in ((QUERIES, 192), (keys, 192), (keys, 128))
        )
        if offset:  # every raw score is near -160,000
            q[..., -1], k[..., -1] = -offset, offset
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD", backend="fa2")
        ends = (torch.tensor([0, rows], dtype=torch.int32, device=DEVICE) for rows in (QUERIES, keys))
        sizes = {"head_dim_vo": 128, "sm_scale": SCALE, "q_data_type": q.dtype, "kv_data_type": q.dtype}
        wrapper.plan(*ends, HEADS, HEADS, 192, causal=False, **sizes)
        lse = wrapper.run(q, k, v, return_lse=True)[1].double() * math.log(2)
        heads = (SCALE * (q[:, head].double() @ k[:, head].double().T) for head in range(HEADS))
        error = (lse - torch.stack([scores.logsumexp(-1) for scores in heads], 1)).abs().max().item()
        drift = (keys / 128) * 2.0 ** (math.floor(math.log2(max(1, offset**2 * SCALE / math.log(2)))) - 24) * math.log(2)
        print(f"{keys} keys, raw scores near {-(offset**2)}: LSE off by {error:.4f}, half a last place a tile is {drift:.4f}")
        wrong |= error > MOST
print("WRONG" if wrong else "right")
sys.exit(int(wrong))
