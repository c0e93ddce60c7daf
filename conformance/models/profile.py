"""What a model asks of kernels, as its configuration tells it. No torch."""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from mla_conformance.files.whole import InputError


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """The narrow heads that score cached tokens, the same on each rank; they select tokens, or pools of them."""

    heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True, kw_only=True)
class Selection:
    topk: int  # columns of the lists that name keys of the cache: those of the indexer, or those of a window
    indexer: Indexer  # what selects
    sinks: bool = False  # whether a logit of each head takes its share of the weights
    # columns of the lists that name compressed keys of a second cache, for each kind of layer with one
    second: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model's attention. Symbols as in SPEC: P, R, V head dims, L the latent's."""

    name: str  # what ``--model`` or ``--config`` was given
    model_type: str  # its architecture, as published
    hidden_size: int  # columns of a layer's input
    heads: int  # of all ranks together
    q_lora_rank: int | None  # columns of a query's latent; None without one
    dims: tuple[int, int, int, int]  # P, R, V and L
    scale: int  # softmax scale in percent of (P + R)^-1/2
    rope: str  # what rotates, in words
    layers: tuple[tuple[str, int], ...]  # kinds of its layers with their numbers
    selection: Selection | None  # how it selects keys; None if it attends to all of them
    outside: tuple[str, ...]  # what the model computes outside of the kernel, in words, beyond norms and rotation

    @property
    def tensor_parallel_sizes(self) -> tuple[int, ...]:
        """Numbers of ranks that the heads can be shared by."""
        return tuple(ranks for ranks in range(1, self.heads + 1) if self.heads % ranks == 0)

    @property
    def cache_layouts(self) -> dict[str, tuple[str, ...]]:
        """The layouts of cases that each name of a cache stands for: an engine takes the one that its kernel reads."""
        if self.selection is None or (self.dims[3] != 512 and not self.selection.second):  # a packed entry's latent
            return {"auto": ("auto",), "fp8": ("fp8",)}
        # DeepSeek-V4's is packed whatever it is called (vLLM, ``_resolve_dsv4_kv_cache_dtype`` and, of the others,
        # ``_canonicalize_sparse_mla_kv_cache_dtype``).
        if self.selection.second:
            return dict.fromkeys(("auto", "fp8", "fp8_v4"), ("fp8_v4",))
        return {"auto": ("auto",), "fp8": ("fp8", "fp8_ds_mla"), "fp8_ds_mla": ("fp8_ds_mla",)}


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str  # its name, or the file that describes it
    tp: Annotated[int, Meta(ge=1)]  # ranks that share its heads
    kv_cache: str  # what its cache is called
    heads: Annotated[int, Meta(ge=1)]  # of a rank

    @staticmethod
    def of(profile: ModelProfile, tp: int, kv_cache: str) -> "Deployment":
        if profile.heads % tp:
            shares = ", ".join(map(str, profile.tensor_parallel_sizes))
            raise InputError(f"--tp {tp}: {profile.name} has {profile.heads} heads; expected one of {shares}")
        if kv_cache not in profile.cache_layouts:
            known = ", ".join(profile.cache_layouts)
            raise InputError(f"--kv-cache {kv_cache}: expected one of {known} for {profile.name}")
        return Deployment(model=profile.name, tp=tp, kv_cache=kv_cache, heads=profile.heads // tp)

    def __str__(self) -> str:
        return f"{self.model} at TP {self.tp}" + (f", {self.kv_cache} cache" if self.kv_cache != "auto" else "")
