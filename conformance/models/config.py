"""A model's ``config.json`` of Hugging Face's form, or what was read of one that is known by name. No torch.

What no configuration tells of an architecture is from transformers 5.17.0 and vLLM 0.33.0.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mla_conformance.backends.references import unknown
from mla_conformance.files.whole import InputError, convert, decode, read_text
from mla_conformance.models.profile import ModelProfile, Selection
from mla_conformance.reference.dimensions import yarn_softmax_factor

_STORED = files("mla_conformance.fixtures") / "models"


@dataclass(frozen=True, kw_only=True)
class Family:
    # what their layers attend to: all keys, selected keys, or a window and compressed keys
    attends: Literal["all", "selected", "compressed"] = "all"
    sinks: bool = False  # whether heads have an attention sink
    rotates: bool = True  # whether the R columns of queries and keys are rotated
    shares_hidden_size: bool = False  # whether V is hidden_size / heads unless it is told
    outside: tuple[str, ...] = ()  # what the models compute outside of the kernel, whatever their configuration says


_GATED = ("output gate",)
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "youtu"), Family()),
    "axk2": Family(attends="selected", outside=_GATED),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), Family(attends="selected")),
    "deepseek_v4": Family(attends="compressed", sinks=True, outside=("compressed keys", "rotation of the output back")),
    "glm5_next_text": Family(attends="selected", rotates=False, outside=("pools of the indexer's tokens",)),
    "hy_v4": Family(attends="selected", sinks=True, outside=_GATED),
    "kimi_linear": Family(rotates=False),
    "longcat_flash": Family(outside=("rescaled latents",)),
    "minicpm3": Family(shares_hidden_size=True),
    "mistral4": Family(outside=("queries scaled by position",)),
}
_MOST = 2**20
_Size = Annotated[int, Meta(ge=1, le=_MOST)]
_Width = Annotated[int, Meta(ge=1, le=2**13)]
_Columns = Annotated[int, Meta(ge=1, le=2**16)]
_Layer = Annotated[str, Meta(max_length=64)]
# What layers are called whose compression is told as a number (transformers, ``DeepseekV4Config``).
_COMPRESSION = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
_WHOLE_COMPRESSED = 64  # columns of the lists of layers that attend to all heavily compressed keys: 8,192 tokens


class _Rope(Struct):
    rope_theta: float | None = None
    rope_type: str = ""
    type: str = ""  # both names of the field are in use
    factor: Annotated[float, Meta(ge=1, le=_MOST)] = 1.0
    mscale_all_dim: Annotated[float, Meta(ge=0, le=_MOST)] = 0.0


class _LinearAttention(Struct):
    full_attn_layers: tuple[int, ...]
    kda_layers: tuple[int, ...]


class _Config(Struct):
    hidden_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Width
    qk_rope_head_dim: Annotated[int, Meta(ge=0, le=2**13, multiple_of=2)] | None = None
    kv_lora_rank: _Width | None = None
    qk_nope_head_dim: _Width | None = None
    v_head_dim: _Width | None = None
    q_lora_rank: _Width | None = None
    head_dim: Annotated[int, Meta(ge=0, le=2**13)] | None = None  # 0 of a model that rotates nothing
    rope_theta: float | None = None
    compress_rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    index_topk: _Columns | None = None
    index_n_heads: _Width | None = None
    index_head_dim: _Width | None = None
    index_kpool: _Columns = 1
    sliding_window: _Columns | None = None
    compress_ratios: tuple[int, ...] | None = None
    layer_types: tuple[_Layer, ...] | None = None
    linear_attn_config: _LinearAttention | None = None
    mla_use_output_gate: bool = False


def read_config(path: Path) -> ModelProfile:
    return profile_of(decode(read_text(path), dict[str, Any], str(path)), str(path))


def profile_of(data: Mapping[str, Any], name: str) -> ModelProfile:
    """The profile that a configuration describes, or its ``text_config``; errors have the model's name, too."""
    text = data.get("text_config")
    data = text if isinstance(text, dict) else data
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        said = f"model_type {model_type!r} is not known here as an architecture with Multi-head Latent Attention"
        raise InputError(f"{name}: {said}; expected one of {', '.join(sorted(FAMILIES))}")
    config, family = convert(data, _Config, name), FAMILIES[model_type]

    def need(field: str) -> int:
        if (value := getattr(config, field)) is None:
            raise InputError(f"{name}: {field}: expected a number, got none")
        return int(value)

    # As published before transformers 5 or since; DeepSeek-V4 since then has two, of which one is scaled.
    reported = config.rope_parameters or config.rope_scaling or {}
    reported = reported["compress"] if isinstance(reported.get("compress"), dict) else reported
    rope, scale, words = convert(reported, _Rope, f"{name}: rope parameters"), 1.0, "none"
    if family.rotates and config.qk_rope_head_dim:
        theta = rope.rope_theta or config.compress_rope_theta or config.rope_theta
        factor, kind = f" × {rope.factor:g}" if rope.factor > 1 else "", rope.rope_type or rope.type or "default"
        words = f"{kind}{factor}" + (f", theta {theta:g}" if theta else "")
        if kind != "default":  # whatever the length is that YaRN extends
            scale = yarn_softmax_factor(rope.factor, rope.mscale_all_dim)
    if family.attends == "compressed":
        whole = need("head_dim")  # rotated columns are among those of the value
        dims = (whole, 0, whole, whole)
    else:
        value = config.v_head_dim
        if value is None and family.shares_hidden_size:
            value = config.hidden_size // config.num_attention_heads
        value = value or need("v_head_dim")
        dims = need("qk_nope_head_dim"), need("qk_rope_head_dim"), value, need("kv_lora_rank")
    kinds = _kinds(name, config, family)
    return ModelProfile(
        name=name,
        model_type=model_type,
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        dims=dims,
        scale=round(100 * scale),
        rope=words,
        layers=tuple((kind.replace("_", " "), number) for kind, number in Counter(kinds).items()),
        selection=None if family.attends == "all" else _selection(config, family, kinds, need),
        outside=(*family.outside, *(["output gate"] if config.mla_use_output_gate else [])),
    )


def _kinds(name: str, config: _Config, family: Family) -> Sequence[str]:
    linear, count = config.linear_attn_config, config.num_hidden_layers
    kinds: Sequence[str] = ["full_attention" if family.attends == "all" else "deepseek_sparse_attention"] * count
    if config.layer_types:
        kinds = config.layer_types[:count]
    elif config.compress_ratios:
        ratios = config.compress_ratios[:count]
        if strange := [ratio for ratio in ratios if ratio not in _COMPRESSION]:
            known = ", ".join(map(str, _COMPRESSION))
            raise InputError(f"{name}: compress_ratios: expected numbers among {known}, got {strange[0]}")
        kinds = [_COMPRESSION[ratio] for ratio in ratios]
    elif linear:
        kinds = [*["linear_attention"] * len(linear.kda_layers), *["full_attention"] * len(linear.full_attn_layers)]
    if len(kinds) != count:
        raise InputError(f"{name}: num_hidden_layers: expected {len(kinds)}, one for each kind, got {count}")
    return kinds


def _selection(config: _Config, family: Family, kinds: Sequence[str], need: Callable[[str], int]) -> Selection:
    heads, dim, topk = map(need, ("index_n_heads", "index_head_dim", "index_topk"))
    pools, second = topk // config.index_kpool, tuple[int, ...]()
    if family.attends == "compressed":
        columns = {_COMPRESSION[4]: pools, _COMPRESSION[128]: _WHOLE_COMPRESSED}
        topk, second = need("sliding_window"), tuple(columns[kind] for kind in columns if kind in kinds)
    indexer = {"index_heads": heads, "index_dim": dim, "index_topk": pools}
    return Selection(topk=topk, sinks=family.sinks, second=second, **indexer)


class Reading(Struct, frozen=True, forbid_unknown_fields=True):
    source: str  # repository, commit and path; a thread; or a released package and its file
    config: Annotated[dict[str, Any], Meta(min_length=1)]  # the figures under their published names
    unconfirmed: str | None = None  # why the source does not speak for the published model; None if it does


class StoredModel(Struct, frozen=True, forbid_unknown_fields=True):
    published: str  # its name where it is published
    model_type: str  # its architecture
    readings: tuple[Reading, ...]  # what was read of its configuration

    @property
    def config(self) -> dict[str, Any]:
        figures = {figure: value for reading in self.readings for figure, value in reading.config.items()}
        return {"model_type": self.model_type, **figures}

    @property
    def unconfirmed(self) -> tuple[str, ...]:
        return tuple(figure for reading in self.readings if reading.unconfirmed for figure in reading.config)


def model_names() -> tuple[str, ...]:
    return tuple(sorted(entry.name.removesuffix(".json") for entry in _STORED.iterdir()))


def stored_model(name: str) -> StoredModel:
    if name not in model_names():
        raise InputError(unknown("model", name, model_names(), "mla-conformance models", ", or --config PATH"))
    return decode((_STORED / f"{name}.json").read_text(encoding="utf-8"), StoredModel, name)


def find_model(name: str) -> ModelProfile:
    return profile_of(stored_model(name).config, name)
