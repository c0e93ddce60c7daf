"""What the MLA layers of released models have beyond their matrices, as one value that is checked where it is made."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mla_conformance.reference.dimensions import ModelDimensions
from mla_conformance.reference.projections import MLAWeights
from mla_conformance.reference.rope import Rotation
from mla_conformance.reference.yarn import is_finite

GateInput = Literal["hidden", "query_latent"]
"""What an output gate is projected from."""


@dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """Queries that grow with their position p: times 1 + beta · ln(1 + ⌊p / period⌋), as Llama 4 and Mistral 4 do.

    Raises ValueError for a beta or a period, in tokens, that is not above 0.
    """

    beta: float
    period: int

    def __post_init__(self) -> None:
        if not (is_finite(self.beta) and self.beta > 0 and type(self.period) is int and self.period > 0):
            raise ValueError(f"expected a beta and a period in tokens above 0, got {self.beta!r} and {self.period!r}")

    def factors(self, positions: Tensor) -> Tensor:
        """[T] float64, for positions [T]."""
        return 1 + self.beta * torch.log1p(torch.div(positions, self.period, rounding_mode="floor").to(torch.float64))


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One MLA layer of a model, but for its weights.

    model: name of the model; errors begin with it.
    dims: sizes.
    scale: softmax scale with all that a model multiplies it by, YaRN's `softmax_factor` among it.
    rotation: RoPE of queries and shared key; None rotates nothing, however wide the rotary part is.
    q_norm, kv_norm, k_pe_norm: the epsilon of an RMSNorm of the latent query, of the cached latent, of the shared key
    before it is rotated; None without.
    doubled_query_latent: queries are projected from 2·Lq columns, the normalised latent and the latent as it was.
    q_factor, kv_factor: factors of the queries and of the cached latent, behind the norms.
    growth: of the queries with their position; None without.
    gate: what the output's gate is projected from: sigmoid of it times the output before W_O; None without.
    window: a row sees its own token and the window - 1 before it, so 1 is itself alone, as in the `sliding_window` of
    transformers' masks and in FlashAttention's `window_size=(window - 1, 0)`; None for all.
    sink: whether each head has the logit of a sink among its weights.
    selects: whether a row attends to the tokens of a list that an indexer chose.

    Raises ValueError for what does not fit together.
    """

    model: str
    dims: ModelDimensions
    scale: float
    rotation: Rotation | None
    q_norm: float | None = None
    kv_norm: float | None = None
    k_pe_norm: float | None = None
    doubled_query_latent: bool = False
    q_factor: float = 1.0
    kv_factor: float = 1.0
    growth: QueryGrowth | None = None
    gate: GateInput | None = None
    window: int | None = None
    sink: bool = False
    selects: bool = False

    def __post_init__(self) -> None:
        for name in ("scale", "q_factor", "kv_factor"):
            value = getattr(self, name)
            self._require(is_finite(value) and value > 0, name, "a finite number above 0")
        for name in ("q_norm", "kv_norm", "k_pe_norm"):
            value = getattr(self, name)
            self._require(value is None or (is_finite(value) and 0 <= value < 1), name, "an epsilon, or None")
        self._require(self.gate in (None, *get_args(GateInput)), "gate", f"one of {get_args(GateInput)}, or None")
        window = self.window
        self._require(window is None or (type(window) is int and window > 0), "window", "a positive int, or None")
        self._check_query_latent()
        self._check_rotary_part()

    @property
    def query_columns(self) -> int:
        """Columns that queries are projected from."""
        rank = self.dims.q_lora_rank or self.dims.hidden_size
        return 2 * rank if self.doubled_query_latent else rank

    def check(self, weights: MLAWeights) -> None:
        """Raise ValueError unless the weights are those of such a layer."""
        expected = self.weight_shapes
        for name, weight in vars(weights).items():
            got = None if weight is None else tuple(weight.shape)
            if got not in expected[name]:
                wanted = " or ".join(map(str, expected[name]))
                raise ValueError(f"{self.model}: expected {name} of shape {wanted}, got {got}")

    @property
    def weight_shapes(self) -> dict[str, tuple[tuple[int, ...] | None, ...]]:
        """The shapes that each of `MLAWeights` may have; None for one that the layer does not have."""
        dims, head, heads = self.dims, self.dims.head, self.dims.num_heads
        hidden, rank, latent, width = dims.hidden_size, dims.q_lora_rank, dims.kv_lora_rank, head.v_head_dim
        rope, queries = head.qk_rope_head_dim, self.query_columns
        gated = hidden if self.gate == "hidden" else queries
        return {
            "W_DQ": ((hidden, rank) if rank else None,),
            "W_UQ": ((queries, heads, head.qk_nope_head_dim),),
            "W_QR": ((queries, heads, rope),),
            "W_DKV": ((hidden, latent),),
            "W_UK": ((latent, heads, head.qk_nope_head_dim),),
            "W_KR": ((hidden, rope),),
            "W_UV": ((latent, heads, width),),
            "W_O": ((heads * width, hidden),),
            "q_norm": ((rank,) if rank and self.q_norm is not None else None,),
            "kv_norm": (None if self.kv_norm is None else (latent,),),
            "k_pe_norm": (None if self.k_pe_norm is None else (rope,),),
            "W_G": ((gated, heads, width), (gated, heads, 1)) if self.gate else (None,),
            "sink": ((heads,) if self.sink else None,),
        }

    def _check_query_latent(self) -> None:
        if self.dims.q_lora_rank is None:
            missing = "without a latent query, its q_lora_rank being None"
            self._require(self.q_norm is None, "q_norm", f"None {missing}")
            self._require(not self.doubled_query_latent, "doubled_query_latent", f"False {missing}")
            self._require(self.gate != "query_latent", "gate", f"'hidden' or None {missing}")
        normed = self.q_norm is not None or not self.doubled_query_latent
        self._require(normed, "doubled_query_latent", "False where the latent is not normalised")

    def _check_rotary_part(self) -> None:
        dim, rotation = self.dims.head.qk_rope_head_dim, self.rotation
        fits = rotation is None or rotation.dim == dim
        self._require(fits, "rotation", f"frequencies for {dim // 2} pairs, half of qk_rope_head_dim")
        self._require(self.k_pe_norm is None or dim > 0, "k_pe_norm", "None where qk_rope_head_dim is 0")

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise ValueError(f"{self.model}: expected {name} to be {expected}, got {getattr(self, name)!r}")
