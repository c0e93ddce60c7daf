"""What the kernel beside this file computes, for mla-conformance; nothing else imports it."""

from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends.checks import check_decode_operands
from mla_conformance.backends.decode import MLADecodeBackend


class Backend(MLADecodeBackend):
    kernel: Any  # the package, which mla-conformance loads

    @staticmethod
    def get_name() -> str:
        return "MY_MLA"

    def run_decode(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        batch = self._decode_metadata
        check_decode_operands(self, batch, ql_nope, q_pe, kv_cache)  # refuses what is not declared
        output, lse = self.kernel.mla_decode(
            torch.cat((ql_nope, q_pe), dim=-1),
            kv_cache,
            batch.block_table,
            batch.seq_lens,
            scale=self.scale,
            value_dim=self.kv_lora_rank,
        )
        return output, lse.mT
