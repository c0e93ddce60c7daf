"""A wrong result of VLLM_CACHE, vllm 0.33.0.
Case cache_combinations:call=write_index;dtype=fp16;dims=128-0-128-128;q=[81x4];kv=[0x4];cache=fp8_index
write index: the latent in slot 704 of the cache is not the code nearest to the new token's (SPEC 9.1)
Keys in bf16 are right, in fp16 wrong. A scale must be the largest magnitude of its key over 448.
Exit status: 1 while a number is wrong, 0 if all are right, 2 if that cannot be told here.
"""
import sys

try:
    import torch

    if not torch.cuda.is_available():
        raise ImportError("torch finds no GPU")
    import vllm._C_stable_libtorch  # registers the operators
except ImportError as error:
    print(f"cannot be told here: {error} (needs torch, vllm)")
    sys.exit(2)

DEVICE, PAGE, WIDTH, SLOTS = "cuda", 64, 128, [0, 1, 63, 64, 100]
keys = torch.randn(len(SLOTS), WIDTH, generator=torch.Generator().manual_seed(0))
CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
CODES = CODES[CODES.isfinite()]


def written(k, form):  # codes and scale of each key, read back from the pages: first all codes, then all scales
    cache = torch.zeros(2, PAGE, WIDTH + 4, dtype=torch.uint8, device=DEVICE)
    slots = torch.tensor(SLOTS, dtype=torch.int64, device=DEVICE)
    torch.ops._C_cache_ops.indexer_k_quant_and_cache(k.to(DEVICE), cache, slots, WIDTH, form)
    codes, scales = cache.cpu().flatten(1).tensor_split([PAGE * WIDTH], dim=1)
    codes = codes.reshape(-1, WIDTH)[SLOTS].contiguous().view(torch.float8_e4m3fn).double()
    return codes, scales.contiguous().view(torch.float32).flatten()[SLOTS].double()


wrong = False
for dtype in (torch.bfloat16, torch.float16):
    for form in ("fp32", "ue8m0"):
        k = keys.to(dtype)
        (codes, scales), x = written(k, form), k.double()
        expected = x.abs().amax(dim=1) / 448
        expected = expected.log2().ceil().exp2() if form == "ue8m0" else expected
        nearest = (CODES * expected[:, None, None] - x[..., None]).abs().amin(dim=-1)
        error = (codes * scales[:, None] - x).abs()
        bad = ~(error <= nearest + 2.0**-20 * x.abs())
        print(f"{dtype}, scales in {form}: {int(bad.sum())} of {bad.numel()} are not the nearest code")
        if bad.any():
            row, column = bad.nonzero()[0].tolist()
            got = codes[row, column] * scales[row]
            print(f"  key {row}: scale {scales[row]:.6g}, expected {expected[row]:.6g}; column {column}: "
                f"{got:.6g}, expected {x[row, column]:.6g} within {nearest[row, column]:.2g}")
        wrong |= bool(bad.any())
print("WRONG" if wrong else "right")
sys.exit(int(wrong))
