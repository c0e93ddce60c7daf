"""The MLA layers that transformers has, each with a small configuration and with what the reference calls it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mla_conformance.reference.dimensions import MLADimensions, ModelDimensions
from mla_conformance.reference.layer import LayerSpec, QueryGrowth
from mla_conformance.reference.rope import Rotation, plain_frequencies
from mla_conformance.reference.yarn import Yarn

HIDDEN, HEADS, Q_RANK, LATENT, NOPE, ROPE, VALUE = 48, 4, 32, 24, 16, 8, 12
INDEX_HEADS, INDEX_WIDTH, INDEX_TOPK, INDEX_POOL = 3, 20, 6, 2
WINDOW = 5
CLASS_EPSILON, CONFIGURED_EPSILON = 1e-6, 1e-5
"""Of norms whose class has its own, and of those that follow the configuration."""


@dataclass(frozen=True, kw_only=True)
class IndexerForm:
    """What indexers differ in: RoPE's pairs, whether the rotary part comes last, the epsilon of the key's norm."""

    interleaved: bool
    rope_last: bool = False
    epsilon: float = CLASS_EPSILON


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models whose attention is one class of transformers.

    Attributes:
        module: ``transformers.models.MODULE.modeling_MODULE``.
        prefix: what its classes begin with.
        spec: the layer as the reference describes it; its ``model`` names the models.
        settings: of the configuration, beyond the sizes.
        attention: what the class of the attention ends with.
        indexer: form of its indexer; None without one, and for one that the reference has no scores of.
        padding_mask: its attention is given which tokens are none, and masks by its indexer's choice alone.
    """

    module: str
    prefix: str
    spec: LayerSpec
    settings: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "Attention"
    indexer: IndexerForm | None = None
    padding_mask: bool = False

    @property
    def configuration(self) -> dict[str, Any]:
        """The arguments of its configuration."""
        head = self.spec.dims.head
        sizes = {
            "hidden_size": HIDDEN,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "q_lora_rank": self.spec.dims.q_lora_rank,
            "kv_lora_rank": LATENT,
            "qk_nope_head_dim": head.qk_nope_head_dim,
            "qk_rope_head_dim": head.qk_rope_head_dim,
            "v_head_dim": head.v_head_dim,
            "rms_norm_eps": CONFIGURED_EPSILON,
        }
        if self.spec.selects:
            sizes |= {"index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_WIDTH, "index_topk": INDEX_TOPK}
        return sizes | dict(self.settings)


def _spec(
    model: str,
    rotation: Rotation | None,
    *,
    factor: float = 1.0,
    q_lora_rank: int | None = Q_RANK,
    rope: int = ROPE,
    epsilon: float = CLASS_EPSILON,
    **parts: Any,
) -> LayerSpec:
    """The common form: both latents normalised, the scale that of the head's width times ``factor``."""
    head = MLADimensions(qk_nope_head_dim=NOPE, qk_rope_head_dim=rope, v_head_dim=VALUE)
    dims = ModelDimensions(hidden_size=HIDDEN, num_heads=HEADS, q_lora_rank=q_lora_rank, kv_lora_rank=LATENT, head=head)
    return LayerSpec(
        model=model,
        dims=dims,
        scale=factor * head.qk_head_dim**-0.5,
        rotation=rotation,
        q_norm=None if q_lora_rank is None else epsilon,
        kv_norm=epsilon,
        **parts,
    )


def _rope(base: float, **options: Any) -> dict[str, Any]:
    """RoPE as a configuration has it."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, **options}}


def _yarn(yarn: Yarn, base: float, **options: Any) -> dict[str, Any]:
    extended = {"factor": yarn.factor, "original_max_position_embeddings": yarn.original_positions}
    scales = {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    turns = {"beta_fast": yarn.beta_fast, "beta_slow": yarn.beta_slow}
    longest = {"max_position_embeddings": int(yarn.factor * yarn.original_positions)}
    return _rope(base, rope_type="yarn", **extended, **scales, **turns, **options) | longest


def _plain(base: float, *, interleaved: bool = True) -> Rotation:
    return Rotation.plain(ROPE, base=base, interleaved=interleaved)


_V2 = Yarn(factor=40.0, original_positions=4096, mscale=0.707, mscale_all_dim=0.707)
_V3 = Yarn(factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0)
# Not the 1.0 of published models: it tells the two factors, and what they reach, apart.
_TOLD_APART = Yarn(factor=32.0, original_positions=4096, mscale=1.0, mscale_all_dim=0.5)
# The published ones reach over 8192 tokens; over 8 a test reaches past them.
_MISTRAL = Yarn(factor=128.0, original_positions=8, mscale=1.0, mscale_all_dim=1.0)
_GROWTH = QueryGrowth(beta=0.1, period=_MISTRAL.original_positions)
_LONG = (1.0, 1.5, 4.0, 11.0)
"""Factors by which LongRoPE slows pairs down."""
_LONG_ROPE = Rotation(
    frequencies=tuple(f / s for f, s in zip(plain_frequencies(ROPE, 1e4), _LONG, strict=True)), interleaved=False
)


def _turned(yarn: Yarn) -> Rotation:
    return Rotation.extended(yarn, ROPE, interleaved=True)


FAMILIES: tuple[Family, ...] = (
    Family(
        module="deepseek_v2",
        prefix="DeepseekV2",
        spec=_spec("DeepSeek-V2", _turned(_V2), factor=_V2.softmax_factor),
        settings=_yarn(_V2, 1e4),
    ),
    Family(
        module="deepseek_v2",
        prefix="DeepseekV2",
        spec=_spec("DeepSeek-V2-Lite", _turned(_V2), factor=_V2.softmax_factor, q_lora_rank=None),
        settings=_yarn(_V2, 1e4),
    ),
    Family(
        module="deepseek_v3",
        prefix="DeepseekV3",
        spec=_spec("DeepSeek-V3, R1, Kimi-K2", _turned(_V3), factor=_V3.softmax_factor),
        settings=_yarn(_V3, 1e4),
    ),
    Family(
        module="deepseek_v3",
        prefix="DeepseekV3",
        spec=_spec("DeepSeek-V3 in a window", _plain(1e4, interleaved=False), window=WINDOW),
        settings=_rope(1e4) | {"rope_interleave": False},
    ),
    Family(
        module="deepseek_v32",
        prefix="DeepseekV32",
        spec=_spec("DeepSeek-V3.2", _turned(_V3), factor=_V3.softmax_factor, selects=True),
        settings=_yarn(_V3, 1e4),
        indexer=IndexerForm(interleaved=False),
    ),
    Family(
        module="glm_moe_dsa",
        prefix="GlmMoeDsa",
        spec=_spec("GLM-5", _plain(1e6), selects=True),
        settings=_rope(1e6),
        indexer=IndexerForm(interleaved=True),
    ),
    Family(
        module="glm4_moe_lite",
        prefix="Glm4MoeLite",
        spec=_spec("GLM-4.7-Flash", _plain(1e6)),
        settings=_rope(1e6),
    ),
    Family(
        module="glm5_next",
        prefix="Glm5NextText",
        spec=_spec("GLM-5.3", None, rope=0, epsilon=CONFIGURED_EPSILON, selects=True),
        settings={
            "layer_types": ["deepseek_sparse_attention"],
            "indexer_types": ["full"],
            "index_kpool": INDEX_POOL,
        },
        padding_mask=True,
    ),
    Family(
        module="kimi_linear",
        prefix="KimiLinear",
        spec=_spec("Kimi-Linear", None, q_lora_rank=None),
        settings={"layer_types": ["full_attention"]},
    ),
    Family(
        module="longcat_flash",
        prefix="LongcatFlash",
        spec=_spec("LongCat-Flash", _plain(1e7), q_factor=(HIDDEN / Q_RANK) ** 0.5, kv_factor=(HIDDEN / LATENT) ** 0.5),
        settings=_rope(1e7) | {"head_dim": ROPE},
        attention="MLA",
    ),
    Family(
        module="minicpm3",
        prefix="MiniCPM3",
        spec=_spec("MiniCPM3", _LONG_ROPE),
        settings=_rope(
            1e4,
            rope_type="longrope",
            factor=1.0,
            short_factor=list(_LONG),
            long_factor=list(_LONG),
            original_max_position_embeddings=32768,
        ),
    ),
    Family(
        module="mistral4",
        prefix="Mistral4",
        spec=_spec("Mistral 4", _turned(_MISTRAL), factor=_MISTRAL.softmax_factor, growth=_GROWTH),
        settings=_yarn(_MISTRAL, 1e4, llama_4_scaling_beta=_GROWTH.beta, partial_rotary_factor=ROPE / (NOPE + ROPE)),
    ),
    Family(
        module="youtu",
        prefix="Youtu",
        spec=_spec("Youtu-LLM", _plain(1.6e6)),
        settings=_rope(1.6e6),
    ),
    Family(
        module="axk1",
        prefix="AXK1",
        spec=_spec("A.X-K1", _turned(_TOLD_APART), factor=_TOLD_APART.softmax_factor),
        settings=_yarn(_TOLD_APART, 1e4),
    ),
    Family(
        module="axk2",
        prefix="AXK2",
        spec=_spec("A.X-K2", _plain(1e4), doubled_query_latent=True, gate="query_latent", selects=True),
        settings=_rope(1e4),
        indexer=IndexerForm(interleaved=False),
    ),
    Family(
        module="hy_v4",
        prefix="HYV4",
        spec=_spec("HY-V4", _plain(1e4, interleaved=False), gate="hidden", sink=True, selects=True),
        settings=_rope(1e4),
        indexer=IndexerForm(interleaved=False, rope_last=True, epsilon=CONFIGURED_EPSILON),
    ),
)
