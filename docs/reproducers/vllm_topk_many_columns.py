"""A wrong result of VLLM_TOPK[prefill], and of VLLM_TOPK[decode], vllm 0.33.0.
Case select_combinations:call=select;q=[1x4];kv=[17,5,8194,64];topk=8194
AcceleratorError: CUDA error: invalid argument (SPEC 3.8)
The launch asks for 4 bytes of shared memory for each selected column, beside some 16 KiB of the kernel's own. Together
they exceed the 48 KiB that a launch may have without asking for more, and no number of columns is refused before.
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

DEVICE, LENGTHS = "cuda", [18, 9000]
logits = torch.randn(len(LENGTHS), max(LENGTHS), generator=torch.Generator().manual_seed(0)).to(DEVICE)
lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)


def prefill(output):
    starts = torch.zeros_like(lengths)
    torch.ops._C.top_k_per_row_prefill(logits, starts, lengths, output, len(logits), *logits.stride(), output.shape[1])


def decode(output):
    torch.ops._C.top_k_per_row_decode(logits, 1, lengths, output, len(logits), *logits.stride(), output.shape[1])


def seen(kernel, k):  # what is wrong with k selected columns; empty if nothing is
    output = torch.full((len(LENGTHS), k), -1, dtype=torch.int32, device=DEVICE)
    try:
        kernel(output)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for row, length in enumerate(LENGTHS):
        best = logits[row, :length].topk(min(k, length)).indices.tolist()
        if sorted(column for column in output[row].tolist() if column >= 0) != sorted(best):
            return f"row {row}: other columns than the largest"
    return ""


wrong = False
for kernel in (prefill, decode):
    for k in (2048, 8192, 8194):
        found = seen(kernel, k)
        print(f"{kernel.__name__} of {k} columns: {found or 'right'}, expected the largest of each row")
        wrong |= bool(found)
print("WRONG" if wrong else "right")
sys.exit(int(wrong))
