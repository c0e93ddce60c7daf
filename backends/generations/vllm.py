"""What a class from an installed vLLM, unchanged, expects beside the interface: vLLM's types and a configuration.

vLLM's classes compare head dims and quantisation keys with values of vLLM's own classes, and some read a few entries of
the engine's configuration. Nothing here needs vLLM unless such a class is given.
"""

from dataclasses import asdict
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.quant_key import QuantKey
from mla_conformance.reference.dimensions import MLADimensions

_DIMENSIONS = "vllm.v1.attention.backends.mla.prefill.base"
_QUANT_KEYS = "vllm.model_executor.layers.quantization.utils.quant_utils"


def is_from_vllm(cls: type) -> bool:
    """Whether a class is one of vLLM's or derived from one."""
    return any(base.__module__.partition(".")[0] == "vllm" for base in cls.__mro__)


class Dialect:
    """How a class's package spells the values that the interface hands it: as this project does.

    Attributes:
        declaration: of a class that declares nothing.
    """

    declaration: ClassVar[Declaration] = Declaration()

    def dimensions(self, dimensions: MLADimensions) -> Any:
        """Head dims."""
        return dimensions

    def quant_key(self, quant_key: QuantKey) -> Any:
        """The key of a quantised output."""
        return quant_key


class VllmDialect(Dialect):
    """vLLM's own classes, from the package that is installed."""

    declaration: ClassVar[Declaration] = Declaration(distributions=("vllm", "torch"))

    def dimensions(self, dimensions: MLADimensions) -> Any:
        """vLLM's ``MLADimensions``; versions that have none do not compare them."""
        theirs = getattr(import_module(_DIMENSIONS), "MLADimensions", None)
        return dimensions if theirs is None else theirs(**asdict(dimensions))

    def quant_key(self, quant_key: QuantKey) -> Any:
        """vLLM's static per-tensor key, the only one that is asked for.

        A vLLM without its optional packages cannot import it; its classes then know no key either.
        """
        try:
            return import_module(_QUANT_KEYS).kFp8StaticTensorSym
        except ImportError:
            return quant_key


def minimal_vllm_config(dimensions: MLADimensions, num_heads: int, dtype: torch.dtype) -> SimpleNamespace:
    """The entries of an engine's configuration that vLLM's MLA prefill backends read, one rank and no warm-up.

    Args:
        dimensions: head dims.
        num_heads: heads on this rank.
        dtype: dtype of the model.
    """
    text = SimpleNamespace(**asdict(dimensions), num_attention_heads=num_heads)
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, hf_text_config=text),
        attention_config=SimpleNamespace(mla_prefill_backend=None, trtllm_ragged_backend="trtllm-gen"),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        compilation_config=SimpleNamespace(static_forward_context={}),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
