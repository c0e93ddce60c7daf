"""A second oracle: the author's own code of a layer, from a file that the user has.

DeepSeek's ``inference/model.py`` (github.com/deepseek-ai/DeepSeek-V3 and DeepSeek-V3.2-Exp), and modules that came with
checkpoints for version 4 of transformers (``modeling_deepseek.py``, MiniCPM3's ``modeling_minicpm.py``). Nothing of it
is kept here.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mla_conformance.proof.families import HEADS, HIDDEN, LATENT, ProofFamily
from mla_conformance.proof.layers import CALLS, TOKENS, TheirCall, Widened, draw_weights
from mla_conformance.reference.selected import NO_KEY

Calls = list[tuple[tuple[int, int], TheirCall]]
"""First token and end, and what a call gave."""
_NAMES = {
    "wq": "q_proj",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
}
"""What transformers calls DeepSeek's matrices and norms."""
_PACKAGE = "authors_code"


@dataclass(frozen=True)
class Oracle:
    """An author's code of the layer of some models.

    Attributes:
        models: names of the families that it computes.
        run: weights by the names of transformers, and what calls gave, of a family and hidden states [TOKENS, H].
    """

    models: tuple[str, ...]
    run: Callable[[ProofFamily, Tensor], tuple[Mapping[str, Tensor], Calls]]


def load(path: Path) -> ModuleType:
    """The author's file as a module, beside the files of its folder; whatever it raises. It is executed.

    Its GPU kernels (``kernel``) are not needed and may be missing: they raise when called.
    """
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(path.parent)]
    kernels = ModuleType("kernel")
    kernels.__getattr__ = _no_kernel  # type: ignore[method-assign]
    spec = importlib.util.spec_from_file_location(f"{_PACKAGE}.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {_PACKAGE: package, "kernel": kernels, spec.name: module}):
        spec.loader.exec_module(module)
    return module


def _no_kernel(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"the author's kernel {name} is not loaded")

    return missing


def oracle_of(code: ModuleType) -> Oracle | None:
    """What the author's code computes; None if it is none of those that are known."""
    if hasattr(code, "ModelArgs") and hasattr(code, "MLA"):
        models = ("DeepSeek-V3.2",) if hasattr(code, "Indexer") else _DENSE
        return Oracle(models, partial(_run_deepseek, code))
    for name, models in _OF_CHECKPOINTS.items():
        if hasattr(code, name):
            return Oracle(models, partial(_run_of_checkpoint, getattr(code, name)))
    return None


_DENSE = ("DeepSeek-V2", "DeepSeek-V2-Lite", "DeepSeek-V3, R1, Kimi-K2")
_OF_CHECKPOINTS = {
    "DeepseekV2Attention": ("DeepSeek-V2",),
    "DeepseekV3Attention": ("DeepSeek-V3, R1, Kimi-K2",),
    "MiniCPMAttention": ("MiniCPM3",),
}


def _run_deepseek(code: ModuleType, family: ProofFamily, hidden: Tensor) -> tuple[Mapping[str, Tensor], Calls]:
    """Each of its implementations over the same weights; of V3.2 with a drawn choice, its indexer being in fp8."""
    code.Linear.dtype = torch.float64
    calls: Calls = []
    for implementation in ("absorb",) if family.spec.selects else ("naive", "absorb"):
        code.attn_impl = implementation  # type: ignore[attr-defined]
        with Widened(), torch.no_grad():
            args = code.ModelArgs(**_deepseek_args(family))
            layer = code.MLA(args)
            if family.spec.selects:
                layer.indexer = _Choice()
            draw_weights(layer.to(torch.float64).eval())
            angles = code.precompute_freqs_cis(args)
            calls += _selecting(layer, angles, hidden) if family.spec.selects else _dense(layer, angles, hidden)
    weights = {name.partition("."): weight for name, weight in layer.named_parameters()}
    return {f"{_NAMES[name]}.{rest}": weight.detach() for (name, _, rest), weight in weights.items()}, calls


def _deepseek_args(family: ProofFamily) -> dict[str, Any]:
    head, rope = family.spec.dims.head, family.settings["rope_parameters"]
    return {
        "max_batch_size": 1,
        "max_seq_len": rope["original_max_position_embeddings"] + 1,
        "dim": HIDDEN,
        "n_heads": HEADS,
        "q_lora_rank": family.spec.dims.q_lora_rank or 0,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": head.qk_nope_head_dim,
        "qk_rope_head_dim": head.qk_rope_head_dim,
        "v_head_dim": head.v_head_dim,
        "original_seq_len": rope["original_max_position_embeddings"],
        "rope_theta": rope["rope_theta"],
        "rope_factor": rope["factor"],
        "mscale": rope["mscale_all_dim"],
    }


class _Choice(torch.nn.Module):
    """Stands for an indexer, and names the tokens [1, T, K] that it is given; a token named twice counts once."""

    named: Tensor

    def forward(self, *inputs: Any) -> Tensor:
        return self.named


def _dense(layer: Any, angles: Tensor, hidden: Tensor) -> Iterator[tuple[tuple[int, int], TheirCall]]:
    for start, end in CALLS:
        found = layer(hidden[None, start:end], start, angles[start:end], _causal(start, end))
        yield (start, end), TheirCall(found[0], None, None)


def _selecting(layer: Any, angles: Tensor, hidden: Tensor) -> Iterator[tuple[tuple[int, int], TheirCall]]:
    """A prefill and decode steps: that code has no extension of what is cached."""
    generator = torch.Generator().manual_seed(5)
    for start, end in (CALLS[0], *((token, token + 1) for token in range(CALLS[0][1], TOKENS))):
        selected = torch.full((end - start, 6), NO_KEY)
        for row, token in zip(selected, range(start, end), strict=True):
            chosen = torch.randperm(token + 1, generator=generator)[: len(row)]
            row[: len(chosen)] = chosen
        layer.indexer.named = torch.where(selected == NO_KEY, selected[:, :1], selected)[None]
        mask = _causal(start, end) if start == 0 else None
        yield (start, end), TheirCall(layer(hidden[None, start:end], start, angles[start:end], mask)[0], selected, None)


def _causal(start: int, end: int) -> Tensor:
    """[T, S] float64 added to scores, 0 or -inf."""
    return torch.full((end - start, end), -torch.inf, dtype=torch.float64).triu_(start + 1)


def _run_of_checkpoint(attention: Any, family: ProofFamily, hidden: Tensor) -> tuple[Mapping[str, Tensor], Calls]:
    """All tokens in one call: their cache is of an older transformers; calls see what is before them either way."""
    with Widened(), torch.no_grad():
        layer = attention(_old_configuration(family), layer_idx=0).to(torch.float64).eval()
        draw_weights(layer)
        positions = torch.arange(TOKENS)[None]
        found = layer(hidden[None], attention_mask=_causal(0, TOKENS)[None, None], position_ids=positions)[0][0]
    calls = [((start, end), TheirCall(found[start:end], None, None)) for start, end in CALLS]
    return {name: weight.detach() for name, weight in layer.named_parameters()}, calls


def _old_configuration(family: ProofFamily) -> SimpleNamespace:
    """As configurations were before version 5 of transformers."""
    rope = dict(family.settings["rope_parameters"])
    scaling = {"type": rope.pop("rope_type"), **rope}
    theta = scaling.pop("rope_theta")
    more = {"rope_theta": theta, "rope_scaling": scaling, "attention_bias": False, "attention_dropout": 0.0}
    longest = {"max_position_embeddings": rope["original_max_position_embeddings"]}
    return SimpleNamespace(**{**longest, **family.configuration, **more})
