"""A wrong result of VLLM_TOPK[prefill], and of VLLM_TOPK[decode], vllm 0.33.0.
Case select_ties:call=select;q=[1,1,1];kv=[300,1000,63];data=nan
top-k: token 0 is selected twice, at request 0, query 0, wrong in 2 of 3 requests, 2 of 3 rows (SPEC 8.4)
A row with NaN has no order, but what is selected must be columns of it, each once, or -1. The last candidates are ranked
by comparisons, which NaN never wins or loses: they all take one place, and others keep what shared memory held.
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

DEVICE, LENGTHS, K = "cuda", [301, 1001, 64], 64
generator = torch.Generator().manual_seed(0)
logits = torch.randn(len(LENGTHS), max(LENGTHS), generator=generator)
nan = torch.arange(max(LENGTHS)) % 3 == 1
lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)


def prefill(x, output):
    starts = torch.zeros_like(lengths)
    torch.ops._C.top_k_per_row_prefill(x, starts, lengths, output, len(x), *x.stride(), K)


def decode(x, output):
    torch.ops._C.top_k_per_row_decode(x, 1, lengths, output, len(x), *x.stride(), K)


wrong = False
for kernel in (prefill, decode):
    for kind, x in (("without NaN", logits), ("with NaN", logits.masked_fill(nan, torch.nan))):
        output = torch.full((len(x), K), -1, dtype=torch.int32, device=DEVICE)
        kernel(x.to(DEVICE), output)
        for row, (got, length) in enumerate(zip(output.tolist(), LENGTHS)):
            twice = sorted({column for column in got if column >= 0 and got.count(column) > 1})
            foreign = sorted({column for column in got if not -1 <= column < length})
            told = f"columns selected twice {twice[:9]}, no columns of the row {foreign[:9]}, expected none"
            print(f"{kernel.__name__}, row {row} of {length}, {kind}: {told}")
            wrong |= bool(twice or foreign)
print("WRONG" if wrong else "right")
sys.exit(int(wrong))
