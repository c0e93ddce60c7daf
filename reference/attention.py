"""The golden definition of attention in float64, of a query t and its visible keys s, and a kernel's error terms.

p_s = exp(scale · q_t·k_s - lse_t),   output_t = Σ p_s v_s,   lse_t = ln Σ exp(scale · q_t·k_s).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

Starts = Sequence[int]  # B + 1 ascending row numbers, from 0: the first row of each request, and the end
WORKSPACE_ELEMENTS = 2**22  # that one [N, rows, S] temporary may hold (32 MiB of float64); a single row always may
_ON_GPU = 8  # times as many on a GPU, where an operation costs the same whatever it has to do, up to about that size
_COMBINATIONS = 4


def workspace_elements(device: torch.device) -> int:
    return WORKSPACE_ELEMENTS * (_ON_GPU if device.type == "cuda" else 1)


@dataclass(frozen=True)
class ErrorTerms:
    """Sums over the visible keys that a first-order error bound is made of, float64; float32 from `blockwise`."""

    magnitude: Tensor  # [T, N, V] Σ p·|v|, the error of rounding p or v relative to a unit roundoff
    score: Tensor  # [T, N, V] Σ p·(Σ_d |scale|·|q_d|·|k_d|)·|v|, that of accumulating the scores
    squares: Tensor  # [T, N, V] Σ p²·v², the variance of independent roundings of p
    peak: Tensor  # [T, N, V] max(p)·Σ |v|, the error of p's absolute floor, which is relative to the largest
    lse_score: Tensor  # [N, T] Σ p·(Σ_d |scale|·|q_d|·|k_d|), what the score's accumulation does to the LSE
    # of keys rounded once more: [T, N, V] Σ p²·(Σ_d (scale·q_d·k_d)²)·(v - o)², the variance where it is independent
    key_spread: Tensor | None = None
    # [T, N] Σ_d (scale·q_d)²·(Σ p·k_d·(v - o))², averaged over the columns, that of roundings which all keys have in
    # common, element by element; estimated from random combinations of the columns, which are too many
    key_shared: Tensor | None = None
    # [T, N, V] |Σ p·s·(v - o)| + |o| with s the score, the error of one that all elements of all keys share
    key_shift: Tensor | None = None

    def by_name(self) -> dict[str, Tensor]:
        return {name: term for name, term in vars(self).items() if term is not None}


@dataclass(frozen=True)
class ProjectedTerms:
    """Sums over the visible keys, [T, N, V] float64, by the letters of SPEC 4.2; o_c = Σ p·c."""

    # the error of projections that are rounded to a unit roundoff, by the route where it is larger: keys and values, E
    # + E_l·|o| + A, or the absorbed query and the attended latent, E~ + E_l~·|o| + Σ_l |o_c|·|W_UV|
    rounding: Tensor
    variance: Tensor  # the same of independent roundings, Q + o² + W + Y or Y~ + Σ_l o_c²·W_UV²
    latent_rounding: Tensor  # that of latents rounded once, E~ + E_l~·|o| + magnitude
    latent_variance: Tensor  # W~ + Y~ + latent_squares
    magnitude: Tensor  # Σ p·Σ_l |c|·|W_UV|, the error of accumulating latents or of rounding parts of their sum
    latent_squares: Tensor  # Σ_l W_UV²·(Σ p²·c² + o_c²), the variance of such roundings, independent or shared
    accumulation: Tensor  # magnitude and what accumulating every product of a score does, Σ |q|·|W_UK|·|c|

    def map(self, change: Callable[[Tensor], Tensor]) -> "ProjectedTerms":
        return ProjectedTerms(**{name: change(term) for name, term in vars(self).items()})


@dataclass(frozen=True)
class AttentionState:
    """Attention over a set of keys, and its error terms; a row that sees no key has output 0 and LSE -inf."""

    output: Tensor  # [T, N, V] float64
    lse: Tensor  # [N, T] float64, natural
    terms: ErrorTerms | None = None
    projected: ProjectedTerms | None = None  # where keys and values are projected from latents and that rounds
    # [T, N, V] each, what `merged_parts` says of storing parts and merging them, where it is known how keys are cut
    merging: tuple[Tensor, Tensor] | None = None
    shared: Tensor | None = None  # [T, N, 3], what `shared_roundings` of P add
    # [N, V], where values are projected, the larger of 1 and Σ |W_UV| over the latents: the error of the floor of a
    # stored value, or of a stored latent that was attended
    value_weights: Tensor | None = None

    def parts(self) -> dict[str, Tensor]:
        """Output, LSE and error terms by name, views with the tokens first."""
        terms = self.terms.by_name() if self.terms else {}
        found = {"output": self.output, "lse": self.lse, **terms}
        return {name: x.mT if name.startswith("lse") else x for name, x in found.items()}

    @staticmethod
    def of(parts: Iterable[tuple[str, Tensor]]) -> "AttentionState":
        made = {name: x.mT if name.startswith("lse") else x for name, x in parts}
        output, lse = made.pop("output"), made.pop("lse")
        return AttentionState(output, lse, ErrorTerms(**made) if made else None)

    def map(self, change: Callable[[Tensor], Tensor]) -> "AttentionState":
        """Output, LSE and error terms changed; ``change`` is given tensors with the tokens first."""
        return AttentionState.of((name, change(x)) for name, x in self.parts().items())


def attention(
    q: Tensor,  # [T, N, D]
    k: Tensor,  # [S, N, D], or [S, 1, D] shared by all heads
    v: Tensor,  # [S, N, V] or [S, 1, V]. Any float dtype, float8 included
    *,
    query_start_loc: Starts,
    key_start_loc: Starts,
    scale: float,  # factor of the logits
    causal: bool,  # aligned bottom-right: query i of q_len sees keys 0 … kv_len-q_len+i; otherwise it sees all kv_len
    with_terms: bool = False,
    with_key_terms: bool = False,
) -> AttentionState:
    """The query_start_loc[-1] rows of B requests laid end to end; keys that a row does not see may be NaN."""
    check_operands(q, k, v, query_start_loc, key_start_loc)
    blocks: list[AttentionState] = []
    for queries, keys in zip(segments(query_start_loc), segments(key_start_loc), strict=True):
        request_q, request_k, request_v = (part.to(torch.float64) for part in (q[queries], k[keys], v[keys]))
        (q_len, num_heads, _), kv_len = request_q.shape, request_k.shape[0]
        block = max(1, workspace_elements(q.device) // max(1, num_heads * kv_len))
        # 0 · NaN is NaN: a weight of 0 cannot hide a key that only later rows see, but a row by itself never meets it.
        if causal and q_len > 1 and not (request_k.sum() + request_v.sum()).isfinite():
            block = 1
        diagonal = kv_len - q_len if causal else kv_len  # query i sees the keys up to i + diagonal
        for start in range(0, max(q_len, 1), block):  # a request without queries is one block of no rows
            stop = min(start + block, q_len)
            last = min(max(diagonal + stop, 0), kv_len)  # of the keys that a row of the block sees
            query = torch.arange(start, stop, device=q.device)
            visible = torch.arange(last, device=q.device) <= query[:, None] + diagonal
            operands = request_q[start:stop], request_k[:last], request_v[:last]
            blocks.append(_attend(*operands, visible, scale, with_terms, with_key_terms))
    return blocks[0] if len(blocks) == 1 else concatenate(blocks)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, with_terms: bool, with_key_terms: bool
) -> AttentionState:
    """The definition, for q [T, N, D], k [S, N or 1, D], v [S, N or 1, V] in float64 and visible [T, S] bool."""
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    hidden = ~visible
    scores = (q @ k.mT).mul_(scale).masked_fill_(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    # Masked again: the softmax of a row without visible keys is NaN, and such a row must weigh nothing.
    p = torch.softmax(scores, dim=-1).masked_fill_(hidden, 0.0)
    output = p @ v
    if not (with_terms or with_key_terms):
        return AttentionState(output.transpose(0, 1), lse)
    weighted, absolute = (q.abs() @ k.abs().mT).mul_(abs(scale)).mul_(p), v.abs()
    largest = p.amax(dim=-1, keepdim=True) if p.shape[-1] else p.sum(dim=-1, keepdim=True)
    terms = ErrorTerms(
        magnitude=(p @ absolute).transpose(0, 1),
        score=(weighted @ absolute).transpose(0, 1),
        squares=(p.square() @ v.square()).transpose(0, 1),
        peak=(largest * (visible.to(torch.float64) @ absolute)).transpose(0, 1),
        lse_score=weighted.sum(dim=-1),
    )
    if with_key_terms:
        terms = replace(terms, **key_terms(q, k, v, p, output, scores.masked_fill_(hidden, 0.0), scale))
    return AttentionState(output.transpose(0, 1), lse, terms)


def key_terms(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, output: Tensor, scores: Tensor, scale: float
) -> dict[str, Tensor]:
    """The key terms by name for operands with the heads first, weights and scores [N, T, S], output [N, T, V]."""
    weights = (q.square() @ k.square().mT).mul_(scale**2).mul_(p.square())
    # Σ w·(v - o)², multiplied out: the differences themselves are too many to be held.
    spread = weights @ v.square() - 2 * output * (weights @ v) + output.square() * weights.sum(dim=-1, keepdim=True)
    scored = p * scores
    shift = (scored @ v - output * scored.sum(dim=-1, keepdim=True)).abs() + output.abs()
    generator = torch.Generator().manual_seed(0)  # a sum of squares over columns is the mean over random signs of them
    signs = torch.randint(0, 2, (v.shape[-1], _COMBINATIONS), generator=generator).to(v) * 2 - 1
    deviations = p.unsqueeze(-1) * ((v @ signs).unsqueeze(1) - (output @ signs).unsqueeze(2))
    # Transposed once, or the product would be of columns for each head anew.
    moments = torch.einsum("nds,ntsr->ntdr", k.mT.contiguous().expand(len(q), -1, -1), deviations)
    shared = (scale**2 * q.square().unsqueeze(-1) * moments.square()).sum(dim=(2, 3)) / signs.numel()
    spread = spread.clamp(min=0.0).transpose(0, 1)
    return {"key_spread": spread, "key_shared": shared.mT, "key_shift": shift.transpose(0, 1)}


def concatenate(blocks: list[AttentionState], *, heads: bool = False) -> AttentionState:
    """Lay the states of consecutive queries end to end, or those of heads side by side."""
    parts = [block.parts() for block in blocks]
    return AttentionState.of((name, torch.cat([each[name] for each in parts], dim=int(heads))) for name in parts[0])


def merge(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(output [T, N, V], lse [N, T]) float64 over the union of the keys of two partial results.

    l = ln(e^l1 + e^l2) and o = e^(l1-l)·o1 + e^(l2-l)·o2. A row that saw no key, of LSE -inf, carries no information:
    whatever its output holds, NaN included, is ignored, and two of them merge to output 0 and LSE -inf.
    """
    lse_a, lse_b = lse_a.to(torch.float64), lse_b.to(torch.float64)
    lse = torch.logaddexp(lse_a, lse_b)

    def weighed(x: Tensor, part: Tensor) -> Tensor:
        """e^(part - lse)·x; exactly 0 where the part is empty, whatever x holds."""
        empty = part == -torch.inf
        share = torch.exp(part - lse).masked_fill(empty, 0.0)
        return (share.mT.unsqueeze(-1) * x.to(torch.float64)).masked_fill(empty.mT.unsqueeze(-1), 0.0)

    return weighed(output_a, lse_a) + weighed(output_b, lse_b), lse


def segments(start_loc: Starts) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(start_loc)]


def check_operands(q: Tensor, k: Tensor, v: Tensor, query_start_loc: Starts, key_start_loc: Starts) -> None:
    """Raise ValueError unless the arguments of :func:`attention` fit together."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 3:
        raise ValueError(f"expected q, k, v of three dimensions [tokens, heads, width], got {shapes}")
    if q.shape[2] != k.shape[2] or k.shape[0] != v.shape[0]:
        raise ValueError(f"expected q and k of one width, k and v of one number of tokens, got {shapes}")
    if k.shape[1] not in (1, q.shape[1]) or v.shape[1] not in (1, q.shape[1]):
        raise ValueError(f"expected k and v of {q.shape[1]} heads, or of 1 shared by all, got {shapes}")
    if len(query_start_loc) != len(key_start_loc) or len(query_start_loc) < 2:
        raise ValueError(
            "expected start locations of one batch, B + 1 entries each with B >= 1, got "
            f"{len(query_start_loc)} for the queries and {len(key_start_loc)} for the keys"
        )
    for name, start_loc, rows in (("query", query_start_loc, q.shape[0]), ("key", key_start_loc, k.shape[0])):
        ascending = all(start <= stop for start, stop in pairwise(start_loc))
        if start_loc[0] != 0 or not ascending or start_loc[-1] > rows:
            raise ValueError(
                f"{name}_start_loc must start at 0, never descend and end within the tensor's {rows} rows, "
                f"got {list(start_loc)}"
            )
