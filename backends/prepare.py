"""The abstract preparation of an indexer's inputs: queries and keys behind their projections, to codes and scales.

Sources: DeepSeek's ``Indexer``, vLLM's ``fused_indexer_q_rope_quant``, AITER's ``indexer_qk_rope_quant_and_cache``.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends.kernel import KernelBackend, expect_one, require_declared, unless
from mla_conformance.backends.operands import Form, require_forms, table

SCALE_FORMATS = ("float32", "pow2")  # any float32 numbers, or powers of two (UE8M0)
BLOCK = 128  # columns that share a scale; a narrower head is one block


class IndexPreparation(NamedTuple):
    """The conventions of a model's indexer, as data."""

    head_dim: int  # D, columns of a query head and of a key
    rope_dim: int  # R, columns that are rotated
    rope_first: bool  # whether they are the first R columns, not the last
    is_neox_style: bool  # whether pairs are R/2 columns apart, not neighbours
    hadamard: bool  # whether queries and keys pass through the orthonormal Hadamard transform, in Sylvester's order
    scale_format: str  # one of :data:`SCALE_FORMATS`
    fold_scales: bool  # whether the weights take the scales of the queries; else these are returned
    eps: float  # of the keys' LayerNorm


class MLAPrepareSelectorConfig(NamedTuple):
    dtype: torch.dtype  # of the model
    num_heads: int  # H
    preparation: IndexPreparation  # the model's conventions


@table
@dataclass
class PrepareMetadata:
    """The positions of a batch's tokens, which all layers of a step share."""

    positions: Annotated[Tensor, Form("T", torch.int64)]
    cos_sin_cache: Annotated[Tensor, Form("P, R", torch.float32)]  # of each position R/2 cosines, then the sines


class MLAPrepareBackend(KernelBackend):
    """Index queries and keys in codes. Symbols: T tokens, H heads of the indexer, D their columns, C blocks of them."""

    supported_head_dims: ClassVar[list[int]] = []  # columns of a head; empty means any
    supported_scale_formats: ClassVar[list[str]] = list(SCALE_FORMATS)  # those of :data:`SCALE_FORMATS` that it writes
    # values of ``is_neox_style`` that it rotates by; and so for the other conventions
    supports_neox_style: ClassVar[list[bool]] = [True, False]
    supports_rope_first: ClassVar[list[bool]] = [True, False]
    supports_hadamard: ClassVar[list[bool]] = [True, False]
    supports_fold_scales: ClassVar[list[bool]] = [True, False]

    @classmethod
    def _reasons(cls, config: MLAPrepareSelectorConfig) -> Iterator[str]:
        asked, dims, scales = config.preparation, cls.supported_head_dims, config.preparation.scale_format
        served = {name: getattr(cls, f"supports_{name}") for name in ("rope_first", "hadamard", "fold_scales")}
        return unless(
            (not dims or asked.head_dim in dims, f"head dim {asked.head_dim} not supported (supported: {dims})"),
            (scales in cls.supported_scale_formats, f"scales {scales} not supported"),
            *(
                (getattr(asked, name) in values, f"{name}={getattr(asked, name)} not supported")
                for name, values in {"is_neox_style": cls.supports_neox_style, **served}.items()
            ),
        )

    def __init__(self, num_heads: int, scale: float, preparation: IndexPreparation, vllm_config: Any) -> None:
        expect_one("scale_format", preparation.scale_format, SCALE_FORMATS)
        self.num_heads, self.scale = num_heads, scale
        self.preparation, self.vllm_config = preparation, vllm_config

    def prepare_metadata(self, prepare_metadata: PrepareMetadata) -> None:
        self._prepare_metadata = prepare_metadata

    @abstractmethod
    @table
    def run_prepare_index(
        self,
        q: Annotated[Tensor, Form("T, H, D", "model")],  # any strides
        k: Annotated[Tensor, Form("T, D", "model")],  # any row stride: a projection may hold the weights beside it
        weights: Annotated[Tensor, Form("T, H", (torch.float32, "model"))],  # any row stride
        k_norm_weight: Annotated[Tensor, Form("D", torch.float32)],
        k_norm_bias: Annotated[Tensor, Form("D", torch.float32)],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries rotated and transformed, keys normalised before that, both in e4m3 with a scale for each block.

        Returns the codes of q [T, H, D] and of k [T, D], the scales of k [T, C] float32, and last, in float32, the
        weights [T, H] times the scale of their query, the softmax scale and H^-1/2; or where they are not folded the
        scales of q [T, H, C].
        """


def check_prepare_call(backend: MLAPrepareBackend, metadata: PrepareMetadata, operands: tuple[Tensor, ...]) -> None:
    """Refuse operands of ``run_prepare_index``, in its order, that do not fit, and what is not declared."""
    asked, q = backend.preparation, operands[0]
    known = {"T": len(metadata.positions), "H": backend.num_heads, "D": asked.head_dim, "R": asked.rope_dim}
    require_forms(MLAPrepareBackend.run_prepare_index, operands, {**known, "model": q.dtype})
    require_forms(PrepareMetadata, vars(metadata), known)
    require_declared(backend, q.device, MLAPrepareSelectorConfig, dtype=q.dtype)
