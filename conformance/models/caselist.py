"""The cases of a deployed model: what its engine calls, at its sizes; ``cases.txt`` holds what all models have."""

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

from mla_conformance.cases.case import Case, CaseError, parse_fields
from mla_conformance.cases.grammar import Fields
from mla_conformance.files.whole import InputError
from mla_conformance.models.profile import Deployment, ModelProfile, Selection
from mla_conformance.reference.dimensions import PRESETS
from mla_conformance.reference.entry_formats import TILED_FORMATS

_PRESETS = {
    (d.head.qk_nope_head_dim, d.head.qk_rope_head_dim, d.head.v_head_dim, d.kv_lora_rank): name
    for name, d in PRESETS.items()
}
_FEWEST_KERNEL_HEADS = 64
"""Heads that engines fill up to where a sparse kernel takes no fewer (vLLM, ``_compute_fp8_decode_padded_heads``)."""
_OF_LISTS = re.compile(r";kv=\[([^;]*topk[^;]*)\]")
"""Lengths that the columns of lists decide."""


def cases_of(profile: ModelProfile, deployment: Deployment) -> tuple[Case, ...]:
    """The cases of a deployed model, each once, part by part."""
    try:
        cases = [Case.of(**fields) for fields in _listed(profile, deployment)]
    except CaseError as error:
        raise InputError(f"{profile.name}: no case can be made of these numbers: {error}") from error
    return tuple(dict.fromkeys(cases))


def dims_of(profile: ModelProfile) -> str:
    return _PRESETS.get(profile.dims, "-".join(map(str, profile.dims)))


def _listed(profile: ModelProfile, deployment: Deployment) -> Iterator[Fields]:
    layouts, selection = profile.cache_layouts[deployment.kv_cache], profile.selection
    common: Fields = {"dims": dims_of(profile), "heads": deployment.heads, "scale": profile.scale}
    common |= {"sink": "drawn"} if selection and selection.sinks else {}
    # Engines prefill what a list would name whole without lists, but no such kernel has sinks or rotates values.
    if selection is None or not (selection.sinks or selection.second):
        yield from _part("prefills", common)
    for layout in layouts:
        cached = {**common, "cache": layout}
        if selection:
            yield from _over_lists(selection, cached)
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
        indexer = selection.indexer
        dims = f"{indexer.head_dim}-0-{indexer.head_dim}-{indexer.head_dim}"
        yield from _part("indexed", {"dims": dims, "heads": indexer.heads, "topk": indexer.topk})


def _over_lists(selection: Selection, cached: Fields) -> Iterator[Fields]:
    """Lists over a cache, and over a second one if there is one; those of packed codes also with heads filled up."""
    layout, is_packed = cached["cache"], cached["cache"] == "fp8_ds_mla"
    fixed = {**cached, "topk": selection.topk, **({"scales": "pow2"} if is_packed else {})}
    seconds: list[Fields] = [{"extra": layout, "extra_topk": columns} for columns in selection.second] or [{}]
    for second in seconds:
        yield from _part("few_lists", {**fixed, **second})
        yield from _part("lists", {**fixed, **second})
    if selection.second:
        yield from _part("few_lists", fixed)
    if is_packed:
        yield from _part("few_lists", {**fixed, "scales": "float32"})
    if cached["heads"] < _FEWEST_KERNEL_HEADS and layout in TILED_FORMATS:
        filled_up = {**fixed, **seconds[0], "heads": _FEWEST_KERNEL_HEADS}
        yield from _part("few_lists", filled_up)
        yield from _part("lists", filled_up)


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
