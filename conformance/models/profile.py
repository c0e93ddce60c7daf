"""What a model asks of kernels, and the cases of one that is deployed: ``cases.txt`` has what all models have."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated

from msgspec import Meta, Struct

from mla_conformance.cases.case import Case, CaseError, parse_fields
from mla_conformance.cases.grammar import Fields
from mla_conformance.files.whole import InputError
from mla_conformance.reference import dimensions, entry_formats


@dataclass(frozen=True, kw_only=True)
class Selection:
    topk: int  # columns of the lists that name keys of the cache: those of the indexer, or those of a window
    sinks: bool  # whether a logit of each head takes its share of the weights
    second: tuple[int, ...]  # columns of lists that name compressed keys of a second cache, by kind of layer
    index_heads: int  # the indexer's narrow heads, the same on each rank, and the tokens, or pools, that they select
    index_dim: int
    index_topk: int


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


class Deployment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


_PRESETS = {
    (d.head.qk_nope_head_dim, d.head.qk_rope_head_dim, d.head.v_head_dim, d.kv_lora_rank): name
    for name, d in dimensions.PRESETS.items()
}
_FEWEST_KERNEL_HEADS = 64
"""Heads that engines fill up to where a sparse kernel takes no fewer (vLLM, ``_compute_fp8_decode_padded_heads``)."""
_OF_LISTS = re.compile(r";kv=\[([^;]*topk[^;]*)\]")  # lengths that the columns of lists decide


def cases_of(profile: ModelProfile, deployment: Deployment) -> tuple[Case, ...]:
    try:
        cases = [Case.of(**fields) for fields in _listed(profile, deployment)]
    except CaseError as error:
        raise InputError(f"{profile.name}: no case can be made of these numbers: {error}") from error
    return tuple(dict.fromkeys(cases))


def dims_of(sizes: tuple[int, int, int, int]) -> str:
    return _PRESETS.get(sizes, "-".join(map(str, sizes)))


def _listed(profile: ModelProfile, deployment: Deployment) -> Iterator[Fields]:
    layouts, selection = profile.cache_layouts[deployment.kv_cache], profile.selection
    common: Fields = {"dims": dims_of(profile.dims), "heads": deployment.heads, "scale": profile.scale}
    common |= {"sink": "drawn"} if selection and selection.sinks else {}
    # Engines prefill what a list would name whole without lists, but no such kernel has sinks or rotates values.
    if selection is None or not (selection.sinks or selection.second):
        yield from _part("prefills", common)
    for layout in layouts:
        cached = {**common, "cache": layout}
        if selection:
            is_packed = layout == "fp8_ds_mla"
            fixed = {**cached, "topk": selection.topk, **({"scales": "pow2"} if is_packed else {})}
            seconds: list[Fields] = [{"extra": layout, "extra_topk": columns} for columns in selection.second] or [{}]
            for second in seconds:
                yield from _part("few_lists", {**fixed, **second})
                yield from _part("lists", {**fixed, **second})
            if selection.second:
                yield from _part("few_lists", fixed)
            if is_packed:
                yield from _part("few_lists", {**fixed, "scales": "float32"})
            if deployment.heads < _FEWEST_KERNEL_HEADS and layout in entry_formats.TILED_FORMATS:
                filled_up = {**fixed, **seconds[0], "heads": _FEWEST_KERNEL_HEADS}
                yield from _part("few_lists", filled_up)
                yield from _part("lists", filled_up)
        else:
            yield from _part("decodes", cached)
            nope, _, value, latent = profile.dims
            # Each weight picks one latent, where there are as many as columns of a head.
            yield from _part("layers", {**cached, "weights": "selection" if max(nope, value) <= latent else "dense"})
    if selection:
        # Those of a second cache are gathered behind the others.
        gathered = {**common, "topk": selection.topk + max(selection.second, default=0)}
        yield from _part("gathered", gathered)
        if deployment.heads < _FEWEST_KERNEL_HEADS:
            yield from _part("gathered", {**gathered, "heads": _FEWEST_KERNEL_HEADS})
        dims = f"{selection.index_dim}-0-{selection.index_dim}-{selection.index_dim}"
        yield from _part("indexed", {"dims": dims, "heads": selection.index_heads, "topk": selection.index_topk})


def _part(name: str, further: Fields) -> Iterator[Fields]:
    """The cases of a part of the file, with further fields; plain ones of a layout have a capability of its own."""
    topk, layout = further.get("topk", 0), further.get("cache", "auto")
    own = {} if layout == "auto" else {"decode": f"kv_cache_{layout}", "sparse_decode": f"sparse_{layout}"}
    for line in _parts()[name]:
        capability, _, text = line.partition(":")
        if capability == "second_cache" and "extra" not in further:
            continue
        lengths: Fields = {}
        if found := _OF_LISTS.search(text):
            text, numbers = text.replace(found[0], ""), list[int]()
            for each in found[1].split(","):  # such as 64, ``topk-1`` or ``3*topk``
                factor, of_lists, more = each.partition("topk")
                numbers.append(int(factor.rstrip("*") or 1) * topk + int(more or 0) if of_lists else int(each))
            lengths = {"kv": tuple(numbers)}
        yield {"capability": own.get(capability, capability), **parse_fields(text), **lengths, **further}


@cache
def _parts() -> dict[str, list[str]]:
    parts = dict[str, list[str]]()
    for line in (files("mla_conformance.models") / "cases.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            parts[line.strip("[]")] = lines = list[str]()
        elif line and not line.startswith("#"):
            lines.append(line)
    return parts
