"""The MLA layers that transformers has, each with a small configuration and with what the reference calls it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mla_conformance.reference.dimensions import MLADimensions
from mla_conformance.reference.layer import ModelDimensions, QueryGrowth, WholeLayer
from mla_conformance.reference.projections import Rotation, plain_frequencies
from mla_conformance.tests.proof.yarn import Yarn

HIDDEN, HEADS, Q_RANK, LATENT, NOPE, ROPE, VALUE = 48, 4, 32, 24, 16, 8, 12
INDEX_HEADS, INDEX_WIDTH, INDEX_TOPK, INDEX_POOL = 3, 20, 6, 2
CLASS_EPSILON, CONFIGURED_EPSILON = 1e-6, 1e-5
"""Of norms whose class has its own, and of those that follow the configuration."""


@dataclass(frozen=True, kw_only=True)
class IndexerForm:
    """What indexers differ in: RoPE's pairs, whether the rotary part comes last, the epsilon of the key's norm."""

    interleaved: bool
    rope_last: bool = False
    epsilon: float = CLASS_EPSILON


@dataclass(frozen=True)
class ProofFamily:
    module: str  # ``transformers.models.MODULE.modeling_MODULE``
    prefix: str  # what its classes begin with
    spec: WholeLayer  # the layer as the reference describes it; its ``model`` names the models
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the configuration, beyond the sizes
    attention: str = "Attention"  # what the class of the attention ends with
    indexer: IndexerForm | None = None  # None without one, and for one that the reference has no scores of
    padding_mask: bool = False  # its attention is given which tokens are none, and masks by its indexer's choice alone

    @property
    def configuration(self) -> dict[str, Any]:
        head = self.spec.dims.head
        sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "rms_norm_eps": CONFIGURED_EPSILON, **asdict(head)}
        sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
        sizes |= {"q_lora_rank": self.spec.dims.q_lora_rank, "kv_lora_rank": LATENT}
        if self.spec.selects:
            sizes |= {"index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_WIDTH, "index_topk": INDEX_TOPK}
        return sizes | dict(self.settings)


def _layer(
    module: str,
    prefix: str,
    model: str,
    rotation: Rotation | None,
    settings: Mapping[str, Any],
    *,
    factor: float = 1.0,
    q_lora_rank: int | None = Q_RANK,
    rope: int = ROPE,
    epsilon: float = CLASS_EPSILON,
    **parts: Any,
) -> ProofFamily:
    """The common form: both latents normalised, the scale that of the head's width times ``factor``."""
    of_family = {name: parts.pop(name) for name in ("attention", "indexer", "padding_mask") if name in parts}
    head = MLADimensions(qk_nope_head_dim=NOPE, qk_rope_head_dim=rope, v_head_dim=VALUE)
    dims = ModelDimensions(hidden_size=HIDDEN, num_heads=HEADS, q_lora_rank=q_lora_rank, kv_lora_rank=LATENT, head=head)
    parts |= {"q_norm": None if q_lora_rank is None else epsilon, "kv_norm": epsilon}
    spec = WholeLayer(model=model, dims=dims, scale=factor * head.qk_head_dim**-0.5, rotation=rotation, **parts)
    return ProofFamily(module, prefix, spec, settings, **of_family)


def _extended(
    module: str, prefix: str, model: str, yarn: Yarn, options: Mapping[str, Any] | None = None, **parts: Any
) -> ProofFamily:
    """One that YaRN extends; ``options`` of its configuration's RoPE."""
    rope = {"rope_type": "yarn", **asdict(yarn)}
    rope["original_max_position_embeddings"] = rope.pop("original_positions")
    longest = {"max_position_embeddings": int(yarn.factor * yarn.original_positions)}
    settings = _rope(1e4, **rope, **(options or {})) | longest
    rotation = yarn.rotation(ROPE, interleaved=True)
    return _layer(module, prefix, model, rotation, settings, factor=yarn.softmax_factor, **parts)


def _plain(module: str, prefix: str, model: str, base: float, interleaved: bool = True, **parts: Any) -> ProofFamily:
    rotation = Rotation.plain(ROPE, base=base, interleaved=interleaved)
    settings = {**_rope(base), **parts.pop("settings", {})}
    return _layer(module, prefix, model, rotation, settings, **parts)


def _rope(base: float, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, **options}}


_V2 = Yarn(factor=40.0, original_positions=4096, mscale=0.707, mscale_all_dim=0.707)
_V3 = Yarn(factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0)
# Not the 1.0 of published models: it tells the two factors, and what they reach, apart.
_TOLD_APART = Yarn(factor=32.0, original_positions=4096, mscale=1.0, mscale_all_dim=0.5)
# The published ones reach over 8192 tokens; over 8 a test reaches past them.
_MISTRAL = Yarn(factor=128.0, original_positions=8, mscale=1.0, mscale_all_dim=1.0)
_GROWTH = QueryGrowth(beta=0.1, period=_MISTRAL.original_positions)
_GROWN = {"llama_4_scaling_beta": _GROWTH.beta, "partial_rotary_factor": ROPE / (NOPE + ROPE)}
_LONG = (1.0, 1.5, 4.0, 11.0)
"""Factors by which LongRoPE slows pairs down."""
_SLOWED = tuple(f / s for f, s in zip(plain_frequencies(ROPE, 1e4), _LONG, strict=True))
_LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "factor": 1.0,
    "short_factor": list(_LONG),
    "long_factor": list(_LONG),
    "original_max_position_embeddings": 32768,
}
_POOLED = {"layer_types": ["deepseek_sparse_attention"], "indexer_types": ["full"], "index_kpool": INDEX_POOL}
_RESCALED: dict[str, Any] = {"q_factor": (HIDDEN / Q_RANK) ** 0.5, "kv_factor": (HIDDEN / LATENT) ** 0.5}
_RESCALED["settings"] = {"head_dim": ROPE}
_PAIRS, _HALVES = IndexerForm(interleaved=True), IndexerForm(interleaved=False)
_LAST = IndexerForm(interleaved=False, rope_last=True, epsilon=CONFIGURED_EPSILON)

_WINDOW: dict[str, Any] = {"settings": {"rope_interleave": False}, "interleaved": False, "window": 5}
_POOLS: dict[str, Any] = {"rope": 0, "epsilon": CONFIGURED_EPSILON, "selects": True, "padding_mask": True}
_GATED: dict[str, Any] = {"doubled_query_latent": True, "gate": "query_latent", "selects": True, "indexer": _HALVES}
_SUNK: dict[str, Any] = {"interleaved": False, "gate": "hidden", "sink": True, "selects": True, "indexer": _LAST}
_FULL = {"layer_types": ["full_attention"]}
_SLOW = Rotation(frequencies=_SLOWED, interleaved=False)

FAMILIES: tuple[ProofFamily, ...] = (
    _extended("deepseek_v2", "DeepseekV2", "DeepSeek-V2", _V2),
    _extended("deepseek_v2", "DeepseekV2", "DeepSeek-V2-Lite", _V2, q_lora_rank=None),
    _extended("deepseek_v3", "DeepseekV3", "DeepSeek-V3, R1, Kimi-K2", _V3),
    _plain("deepseek_v3", "DeepseekV3", "DeepSeek-V3 in a window", 1e4, **_WINDOW),
    _extended("deepseek_v32", "DeepseekV32", "DeepSeek-V3.2", _V3, selects=True, indexer=_HALVES),
    _plain("glm_moe_dsa", "GlmMoeDsa", "GLM-5", 1e6, selects=True, indexer=_PAIRS),
    _plain("glm4_moe_lite", "Glm4MoeLite", "GLM-4.7-Flash", 1e6),
    _layer("glm5_next", "Glm5NextText", "GLM-5.3", None, _POOLED, **_POOLS),
    _layer("kimi_linear", "KimiLinear", "Kimi-Linear", None, _FULL, q_lora_rank=None),
    _plain("longcat_flash", "LongcatFlash", "LongCat-Flash", 1e7, attention="MLA", **_RESCALED),
    _layer("minicpm3", "MiniCPM3", "MiniCPM3", _SLOW, _rope(1e4, **_LONG_ROPE)),
    _extended("mistral4", "Mistral4", "Mistral 4", _MISTRAL, _GROWN, growth=_GROWTH),
    _plain("youtu", "Youtu", "Youtu-LLM", 1.6e6),
    _extended("axk1", "AXK1", "A.X-K1", _TOLD_APART),
    _plain("axk2", "AXK2", "A.X-K2", 1e4, **_GATED),
    _plain("hy_v4", "HYV4", "HY-V4", 1e4, **_SUNK),
)
