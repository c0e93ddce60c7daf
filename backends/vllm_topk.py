"""VLLM_TOPK: the kernels that a step of vLLM 0.33.0's indexer chooses its tokens by, one class for each.

All of them place what they find by atomic counters, so that equal calls name it in other orders.
"""

from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import ALIGNMENT
from mla_conformance.backends.steps import TopKKernel
from mla_conformance.reference.selected import NO_KEY

_NOTE = "its wheels for CUDA have these operators"
VLLM_OPERATORS = packaged.in_extra("vllm", "vllm._C_stable_libtorch", note=_NOTE)
"""Importing it registers them with torch."""
_ROWS = 64  # that the cooperative kernel takes at once
_WORKSPACE = ("wants a workspace", "of 1 MiB, which holds anything, as in vLLM")


class VllmTopKBackend(TopKKernel):
    """The family: first the kernel of a prefill, which alone takes every call."""

    name = "VLLM_TOPK"
    libraries = (VLLM_OPERATORS,)
    devices = packaged.FROM_TURING  # what the wheel has code for
    by_device = {0: ("prefill", "decode", "persistent", "cooperative")}
    supports_row_starts = False
    declaration = packaged.declared(
        "vllm torch", ("writes into numbers of its caller", "-1 beforehand, as in vLLM"), deterministic=False
    )

    def select(self, logits: Tensor, lengths: Tensor, topk_tokens: int) -> Tensor:
        output = torch.full((len(logits), topk_tokens), NO_KEY, dtype=torch.int32, device=logits.device)
        self.libraries[0].load()
        self.fill(logits, lengths.contiguous(), output)
        return output

    def fill(self, logits: Tensor, lengths: Tensor, output: Tensor) -> None:
        raise self.not_a_family()


def _prefill(self: Any, logits: Tensor, lengths: Tensor, output: Tensor) -> None:
    given = self._topk_metadata.row_starts
    starts = torch.zeros_like(lengths) if given is None else given.contiguous()
    sizes = (len(logits), *logits.stride(), output.shape[1])
    torch.ops._C.top_k_per_row_prefill(logits, starts, starts + lengths, output, *sizes)


def _decode(self: Any, logits: Tensor, lengths: Tensor, output: Tensor) -> None:
    """Each row is of a request of one query token."""
    sizes = (len(logits), *logits.stride(), output.shape[1])
    torch.ops._C.top_k_per_row_decode(logits, 1, lengths, output, *sizes)


def _persistent(self: Any, logits: Tensor, lengths: Tensor, output: Tensor, operator: str = "persistent_topk") -> None:
    """In its turn it takes one of several kernels, by the size of the batch."""
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device=logits.device)
    sizes = (output.shape[1], self._topk_metadata.max_seq_len)
    getattr(torch.ops._C, operator)(logits, lengths, output, workspace, *sizes)


def _cooperative(self: Any, logits: Tensor, lengths: Tensor, output: Tensor) -> None:
    """A cluster of thread blocks for each row."""
    (rows, columns), unit = logits.shape, ALIGNMENT // 4
    if logits.stride(0) % unit or logits.data_ptr() % ALIGNMENT:
        logits = logits.new_empty(rows, -(-columns // unit) * unit)[:, :columns].copy_(logits)
    for few, own, written in zip(*(x.split(_ROWS) for x in (logits, lengths, output)), strict=True):
        _persistent(self, few, own, written, operator="cooperative_topk")


_ZEROS = ("wants starts and ends", "zeros where there are no starts, as in vLLM")
VllmTopKBackend.also("prefill", _ZEROS, fill=_prefill, supports_row_starts=True)
VllmTopKBackend.also("decode", fill=_decode)
VllmTopKBackend.also("persistent", _WORKSPACE, fill=_persistent, supported_topk=[512, 1024, 2048]).also(
    "cooperative",
    (f"takes {_ROWS} rows, beyond which vLLM takes the persistent one", "a call for each so many"),
    ("takes rows at multiples of 16 bytes alone", "others are copied"),
    fill=_cooperative,
    devices=packaged.Devices("9.0 or newer, but not 12.x", (9, 0), but=12),
)
