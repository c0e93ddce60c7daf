"""A wrong result of LMDEPLOY_TRITON, lmdeploy 0.18.0.
Case select:q=[1,1];kv=[131134,40];topk=2048
top-k: token 92912 is selected twice, at request 0, query 0 (SPEC 8.4)
Of 131,135 random logits two are equal, in columns 15382 and 92912. Where the kernel compares two equal logits in order
to swap them, it keeps the column of one in both places. A few equal logits in a short row are enough.
Without a GPU Triton interprets the kernel.
Exit status: 1 while a number is wrong, 0 if all are right, 2 if that cannot be told here.
"""
import os
import sys

try:
    import torch

    GPU = torch.cuda.is_available()
    if not GPU:
        os.environ.update({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})  # before it is imported
    import lmdeploy.pytorch.kernels.cuda.bitonic_topk as bitonic_topk
    import lmdeploy.pytorch.kernels.cuda.utils as utils
except ImportError as error:
    print(f"cannot be told here: {error} (needs torch, lmdeploy, triton)")
    sys.exit(2)

DEVICE, COLUMNS, K = "cuda" if GPU else "cpu", 300, 64
if not GPU:
    utils.get_device_props = lambda device=None: {"multi_processor_count": 1}

distinct = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(0)).float()  # 299 is the largest
length = torch.tensor([COLUMNS], dtype=torch.int32, device=DEVICE)
wrong = False
for equal in (1, 2, 8):
    logits = torch.where(distinct >= COLUMNS - equal, float(COLUMNS), distinct)  # so many share the largest
    got = bitonic_topk.bitonic_topk(logits[None].to(DEVICE), length, length, K)[0].tolist()
    best = [column for column in range(COLUMNS) if distinct[column] >= COLUMNS - K]
    twice, left_out = sorted({column for column in got if got.count(column) > 1}), sorted({*best} - {*got})
    print(f"{equal} of the largest logit: columns selected twice {twice}, left out {left_out}, expected none")
    wrong |= bool(twice or left_out)
print("WRONG" if wrong else "right")
sys.exit(int(wrong))
