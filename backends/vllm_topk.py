"""VLLM_TOPK: the kernels that a step of vLLM's indexer chooses its tokens by, one class for each.

``prefill`` and ``decode`` are ``top_k_per_row_prefill`` and ``top_k_per_row_decode``; ``persistent`` and
``cooperative`` come first in a decode on Hopper, for the numbers of columns that they know and, the latter, up to 64
rows. Written for vLLM 0.33.0, as ``vllm/model_executor/layers/indexer_topk.py`` and ``sparse_attn_indexer.py`` call
them. All of them place what they find by atomic counters, so that equal calls name it in other orders.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.conversions import ALIGNMENT
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.platform import FROM_TURING, DeviceCapability, Devices
from mla_conformance.backends.topk import MLATopKBackend, check_topk_call
from mla_conformance.reference.selected import NO_KEY

VLLM_OPERATORS = Library("vllm._C_stable_libtorch", "vllm", extra("vllm"), "its wheels for CUDA have these operators")
"""Importing it registers them with torch."""
_KNOWN = 512, 1024, 2048
_WORKSPACE_BYTES = 1 << 20
_ROWS = 64
"""That the cooperative kernel takes at once."""
_FLOATS = ALIGNMENT // 4
_OUTPUT = Deviation("writes into numbers of its caller", "-1 beforehand, as in vLLM")
_WORKSPACE = Deviation("wants a workspace", "of 1 MiB, which holds anything, as in vLLM")


def _declared(*deviations: Deviation) -> Declaration:
    return Declaration(distributions=("vllm", "torch"), deterministic=False, deviations=deviations)


class VllmTopKBackend(LibraryKernel, MLATopKBackend):
    """The family: first the kernel of a prefill, which alone takes every call.

    Attributes:
        operator: its name in vLLM's compiled library.
    """

    name: ClassVar[str] = "VLLM_TOPK"
    libraries: ClassVar[tuple[Library, ...]] = (VLLM_OPERATORS,)
    devices: ClassVar[Devices] = FROM_TURING  # what the wheel has code for
    supports_row_starts: ClassVar[bool] = False
    declaration: ClassVar[Declaration] = _declared(_OUTPUT)
    operator: ClassVar[str] = ""

    def run_top_k_per_row(self, logits: Tensor, topk_tokens: int) -> Tensor:
        """See :class:`MLATopKBackend`."""
        check_topk_call(self, self._topk_metadata, logits, topk_tokens)
        output = torch.full((len(logits), topk_tokens), NO_KEY, dtype=torch.int32, device=logits.device)
        self._select(logits, self._topk_metadata.lengths.contiguous(), output)
        return output

    def _select(self, logits: Tensor, lengths: Tensor, output: Tensor) -> None:
        """Fill output [T, K] for rows of lengths [T]."""
        raise NotImplementedError(f"VLLM_TOPK is a family of kernels: choose one of {', '.join(self.variants)}")

    def _call(self, *arguments: Any) -> None:
        self.libraries[0].load()
        getattr(torch.ops._C, self.operator)(*arguments)

    def _call_with_workspace(self, logits: Tensor, lengths: Tensor, output: Tensor) -> None:
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=logits.device)
        self._call(logits, lengths, output, workspace, output.shape[1], self._topk_metadata.max_seq_len)


class VllmTopKPrefill(VllmTopKBackend, variant="prefill"):
    """Any windows, any number of columns."""

    operator: ClassVar[str] = "top_k_per_row_prefill"
    supports_row_starts: ClassVar[bool] = True
    declaration: ClassVar[Declaration] = _declared(
        _OUTPUT, Deviation("wants starts and ends", "zeros where there are no starts, as in vLLM")
    )

    def _select(self, logits: Tensor, lengths: Tensor, output: Tensor) -> None:
        given = self._topk_metadata.row_starts
        starts = torch.zeros_like(lengths) if given is None else given.contiguous()
        self._call(logits, starts, starts + lengths, output, len(logits), *logits.stride(), output.shape[1])


class VllmTopKDecode(VllmTopKBackend, variant="decode"):
    """Each row is of a request of one query token."""

    operator: ClassVar[str] = "top_k_per_row_decode"

    def _select(self, logits: Tensor, lengths: Tensor, output: Tensor) -> None:
        self._call(logits, 1, lengths, output, len(logits), *logits.stride(), output.shape[1])


class VllmTopKPersistent(VllmTopKBackend, variant="persistent"):
    """In its turn it takes one of several kernels, by the size of the batch."""

    operator: ClassVar[str] = "persistent_topk"
    supported_topk: ClassVar[list[int | MultipleOf]] = [*_KNOWN]
    declaration: ClassVar[Declaration] = _declared(_OUTPUT, _WORKSPACE)

    def _select(self, logits: Tensor, lengths: Tensor, output: Tensor) -> None:
        self._call_with_workspace(logits, lengths, output)


class VllmTopKCooperative(VllmTopKBackend, variant="cooperative"):
    """A cluster of thread blocks for each row."""

    needed_capability: ClassVar[str] = "9.0 or newer, but not 12.x"
    operator: ClassVar[str] = "cooperative_topk"
    supported_topk: ClassVar[list[int | MultipleOf]] = [*_KNOWN]
    declaration: ClassVar[Declaration] = _declared(
        _OUTPUT,
        _WORKSPACE,
        Deviation(f"takes {_ROWS} rows, beyond which vLLM takes the persistent one", "a call for each so many"),
        Deviation("takes rows at multiples of 16 bytes alone", "others are copied"),
    )

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        """As vLLM's choice."""
        return device_capability is not None and device_capability >= (9, 0) and device_capability.major != 12

    def _select(self, logits: Tensor, lengths: Tensor, output: Tensor) -> None:
        for part in zip(*(x.split(_ROWS) for x in (_aligned(logits), lengths, output)), strict=True):
            self._call_with_workspace(*part)


def _aligned(logits: Tensor) -> Tensor:
    """Logits whose rows start at multiples of 16 bytes."""
    if logits.stride(0) % _FLOATS == 0 and logits.data_ptr() % ALIGNMENT == 0:
        return logits
    rows, columns = logits.shape
    wider = logits.new_empty(rows, -(-columns // _FLOATS) * _FLOATS)
    return wider[:, :columns].copy_(logits)
