"""The cases of a deployed model: what its engine calls, at its sizes, and nothing else. No torch.

They are cases of the capabilities that everybody is judged by; lengths sit at and next to tiles, pages, chunks and
lists.
"""

from collections.abc import Iterable

from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cases.grammar import Fields, Listed, with_fields
from mla_conformance.files.inputs import InputError
from mla_conformance.models.dense_cases import decodes, layers, prefills, weights
from mla_conformance.models.profile import Deployment, ModelProfile
from mla_conformance.models.sparse_cases import indexing, sparse_decodes, sparse_prefills
from mla_conformance.reference.dimensions import PRESETS

_PRESETS = {
    (d.head.qk_nope_head_dim, d.head.qk_rope_head_dim, d.head.v_head_dim, d.kv_lora_rank): name
    for name, d in PRESETS.items()
}


def cases_of(profile: ModelProfile, deployment: Deployment) -> tuple[Case, ...]:
    """The cases of a deployed model, each once, part by part.

    Raises:
        InputError: its numbers are of no model that cases can be made of.
    """
    common = {"dims": dims_of(profile), "heads": deployment.heads, "scale": profile.scale}
    layouts = profile.cache_layouts[deployment.kv_cache]
    listed = [*_of_kernels(profile, layouts, common)]
    if profile.selection:
        listed += indexing(profile.selection.indexer)
    try:
        cases = [Case.of(**{"capability": capability, **fields}) for capability, fields in listed]
    except CaseError as error:
        raise InputError(f"{profile.name}: no case can be made of these numbers: {error}") from error
    return tuple(dict.fromkeys(cases))


def dims_of(profile: ModelProfile) -> str:
    """The head dims as cases name them."""
    return _PRESETS.get(profile.dims, "-".join(map(str, profile.dims)))


def _of_kernels(profile: ModelProfile, layouts: Iterable[str], common: Fields) -> Listed:
    selection = profile.selection
    # Engines prefill what a list would name whole without lists, but no such kernel has sinks or rotates values.
    if selection is None or not (selection.sinks or selection.second):
        yield from with_fields(prefills(), common)
    for layout in layouts:
        if selection is None:
            cached = {**common, "cache": layout}
            yield from with_fields(decodes(layout), cached)
            yield from with_fields(layers(), {**cached, "weights": weights(profile)})
        else:
            yield from sparse_decodes(selection, layout, common)
    if selection:
        yield from sparse_prefills(selection, common)
