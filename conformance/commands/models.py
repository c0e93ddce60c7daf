"""``models``: the models whose deployments can be judged by name."""

import argparse
from collections.abc import Iterator

from mla_conformance.models.caselist import cases_of
from mla_conformance.models.deployment import Deployment
from mla_conformance.models.library import find_model, model_names
from mla_conformance.models.profile import ModelProfile
from mla_conformance.report.terminal import say

_FACTS = "        "


def tell_models(options: argparse.Namespace) -> int:
    """Two lines for every model, or all that is known of one, or the golden layer held against their code.

    Raises:
        InputError: there is no model of that name.
    """
    if options.proof:
        from mla_conformance.proof.report import prove

        return prove(options.docs)
    if options.name:
        for line in _detail(find_model(options.name)):
            say(line)
        return 0
    for profile in map(find_model, model_names()):
        say(_summary(profile))
        say(f"{_FACTS}{profile.source}")
    return 0


def _summary(profile: ModelProfile) -> str:
    facts = [
        f"{profile.heads} heads",
        f"P-R-V-L {_joined(profile.dims)}",
        f"scale {profile.scale} %",
        f"rope {profile.rope}",
        _layers(profile),
        *_selection(profile),
        f"cache {', '.join(profile.cache_layouts)}",
    ]
    return f"{profile.name:<18} {' · '.join(facts)}"


def _detail(profile: ModelProfile) -> Iterator[str]:
    """One fact a line."""
    facts = {
        "architecture": profile.model_type,
        "source": profile.source,
        "hidden size": str(profile.hidden_size),
        "heads": str(profile.heads),
        "P-R-V-L": _joined(profile.dims),
        "query latent": str(profile.q_lora_rank or "none"),
        "softmax scale": f"{profile.scale} % of (P + R)^-1/2",
        "rope": profile.rope,
        "layers": _layers(profile),
        "selection": "; ".join(_selection(profile)) or "none: all keys are attended to",
        "outside kernels": "; ".join(("norms of the latents", "rotation", *profile.outside)),
    }
    yield profile.name
    for name, value in facts.items():
        yield f"  {name:<16} {value}"
    yield f"  {'--tp':<16} {', '.join(map(str, profile.tensor_parallel_sizes))}"
    for cache, layouts in profile.cache_layouts.items():
        count = len(cases_of(profile, Deployment.of(profile, 1, cache)))
        yield f"  --kv-cache {cache:<12} cache layouts {', '.join(layouts)}; {count} cases at --tp 1"


def _joined(dims: tuple[int, ...]) -> str:
    return "-".join(map(str, dims))


def _layers(profile: ModelProfile) -> str:
    return ", ".join(f"{count} × {kind}" for kind, count in profile.layers)


def _selection(profile: ModelProfile) -> list[str]:
    selection = profile.selection
    if selection is None:
        return []
    indexer = selection.indexer
    return [
        f"top {selection.topk}" if not selection.second else f"window {selection.topk}",
        f"indexer {indexer.heads} × {indexer.head_dim}, top {indexer.topk}",
        *([f"second cache, lists of {' or '.join(map(str, selection.second))}"] if selection.second else []),
        *(["sinks"] if selection.sinks else []),
    ]
