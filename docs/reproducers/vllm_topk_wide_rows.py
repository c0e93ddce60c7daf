"""A wrong result of VLLM_TOPK[decode], vllm 0.33.0.
Case select_combinations:call=select;q=[1x4];kv=[17,5,2050,64];inflate=100
top-k: token 17 is selected, expected those below 17, at request 0, query 0 (SPEC 8.4)
From 200,000 columns on the kernel takes several blocks a row. Rows shorter than a small K then name tokens behind their end.
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

LENGTHS = (17, 5, 2050, 64)
wrong = False
for columns in (199_999, 200_000):
    for k in (64, 128, 2048):
        logits = torch.randn(len(LENGTHS), columns, device="cuda")
        lengths = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
        output = torch.full((len(LENGTHS), k), -1, dtype=torch.int32, device="cuda")
        torch.ops._C.top_k_per_row_decode(logits, 1, lengths, output, len(LENGTHS), *logits.stride(), k)
        for row, length in enumerate(LENGTHS):
            behind = sorted(output[row][output[row] >= length].tolist())
            if behind:
                print(f"{columns} columns, K = {k}, row of {length}: names {behind[:4]}, expected those below {length}")
            wrong |= bool(behind)
print("WRONG" if wrong else "right")
sys.exit(int(wrong))
