"""The golden definition of sparse attention: every row attends to the keys that its own list names.

A key that is named twice counts twice. A sink is a logit without a value: the LSE stays that of the keys.
Sources: FlashMLA's ``flash_mla_sparse_fwd``, vLLM's sparse MLA backends.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mla_conformance.reference import attention as definition
from mla_conformance.reference import blockwise, row_sums
from mla_conformance.reference.attention import Starts
from mla_conformance.reference.tiles import Queries, Tile, TileKeys, in_lanes, magnitudes

NO_KEY = -1
_LEAST_SHARE = 2.0**-102  # the least number that float32 holds in full, 2^-126, in units of its roundoff
_KEY_ELEMENTS = 2**24  # of keys that may be gathered at once (128 MiB of float64); those of a single row always may


def selected_attention(
    q: Tensor,  # [T, N, D]
    k: Tensor,  # [S, 1, D] for all heads, or [S, N, D]
    v: Tensor,  # [S, 1, V] or [S, N, V]; any float dtype
    selected: Tensor,  # [T, K] integers, rows of k and v, or -1
    *,
    scale: float,  # factor of the logits
    sink: Tensor | None = None,  # [N], the logit of each head's sink, natural; None without
    with_terms: bool = False,
    with_key_terms: bool = False,
    rows: Sequence[int] | None = None,  # ascending query numbers; None for all
) -> definition.AttentionState:
    """Attention of each of the given rows to the keys of its list; terms are as `blockwise_attention`'s."""
    _check(q, k, v, selected, sink)
    if k.shape[1] > 1:  # each head has keys of its own
        heads = zip(*(x.split(1, dim=1) for x in (q, k, v)), strict=True)
        options: dict[str, Any] = {"with_terms": with_terms, "with_key_terms": with_key_terms, "rows": rows}
        parts = [selected_attention(x, y, z, selected, scale=scale, **options) for x, y, z in heads]
        state = definition.concatenate(parts, heads=True)
        return state if sink is None else with_sink(state, sink)
    chosen = torch.arange(len(q), device=q.device)
    if rows is not None:
        chosen = torch.tensor(rows, dtype=torch.long, device=q.device)
    found = None
    pairs = len(chosen) * q.shape[1] * selected.shape[1]
    if with_terms and not with_key_terms and blockwise.low_precision(pairs, q.device) == torch.bfloat16:
        found = over_lists(q[chosen], k[:, 0], v[:, 0], selected[chosen], scale)
    if found is None:
        # One copy of it: the rows of a part are written where they stand.
        counts = (selected[chosen] != NO_KEY).sum(dim=1)
        for count in counts.unique().tolist():
            # Rows that name equally many keys, as many as fit the workspaces.
            scores = definition.workspace_elements(q.device) // max(1, q.shape[1] * count)
            most = max(1, min(scores, _KEY_ELEMENTS // max(1, k.shape[2] * count)))
            for part in (counts == count).nonzero()[:, 0].split(most):
                lists = selected[chosen[part]]
                named = lists[lists != NO_KEY].view(len(part), -1)
                # The definition for these: a row's heads are its queries, and rows are the heads.
                keys, values = (x[named, 0].transpose(0, 1).to(torch.float64) for x in (k, v))
                queries = q[chosen[part]].transpose(0, 1).to(torch.float64)
                visible = torch.ones(q.shape[1], named.shape[1], dtype=torch.bool, device=q.device)
                state = definition._attend(queries, keys, values, visible, scale, with_terms, with_key_terms)
                some = state.map(lambda x: x.transpose(0, 1))
                found = found or some.map(lambda x: x.new_empty(len(chosen), *x.shape[1:]))
                for whole, own in zip(found.parts().values(), some.parts().values(), strict=True):
                    whole[part] = own
    if found is None:
        raise ValueError("expected at least one row")
    return found if sink is None else with_sink(found, sink)


def with_sink(state: definition.AttentionState, sink: Tensor) -> definition.AttentionState:
    """A state whose output shares its weights with a sink [N]: output · e^lse / (e^lse + e^sink), the LSE as it was.

    What an error of the LSE or of the sink does to the share joins the term of the scores' accumulation, and so does a
    share that is too small for float32. What rounded keys do to it, by the LSE, joins the spread of their roundings.
    """
    share = sink_share(state.lse, sink)
    terms = state.terms
    if terms is not None:
        shift = share * (1 - share) * state.output.abs()
        size = sum(x.masked_fill(x.isinf(), 0.0).abs() for x in (state.lse, sink.to(state.lse).unsqueeze(1)))
        shaken = shift * (terms.lse_score + size + 1).mT.unsqueeze(-1) + _LEAST_SHARE * state.output.abs()
        # Variances go with the square of the share.
        powers = {"lse_score": torch.ones_like(share[..., 0]).mT, "key_shared": share[..., 0].square()}
        powers |= dict.fromkeys(("squares", "key_spread"), share.square())
        scaled = {name: term * powers.get(name, share) for name, term in terms.by_name().items()}
        if terms.key_spread is not None:
            scaled["key_spread"] = (scaled["key_spread"].sqrt() + (shift * terms.lse_score.mT.unsqueeze(-1))).square()
        terms = definition.ErrorTerms(**{**scaled, "score": scaled["score"] + shaken})
    return definition.AttentionState(state.output * share, state.lse, terms)


def sink_share(lse: Tensor, sink: Tensor) -> Tensor:
    """[T, N, 1], what beside a sink [N] remains of the weights of keys with an LSE [N, T]; 0 of no key."""
    return torch.sigmoid(lse - sink.to(lse).unsqueeze(1)).nan_to_num(0.0).mT.unsqueeze(-1)


def _check(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, sink: Tensor | None) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, selected {tuple(selected.shape)}"
    alike = q.dim() == k.dim() == v.dim() == 3 and k.shape[:2] == v.shape[:2]
    if not (alike and k.shape[1] in (1, q.shape[1])):
        raise ValueError(f"expected q [T, N, D], k [S, 1 or N, D] and v [S, 1 or N, V], got {shapes}")
    if q.shape[2] != k.shape[2] or selected.dim() != 2 or len(selected) != len(q):
        raise ValueError(f"expected queries as wide as the keys and a list [T, K] for each, got {shapes}")
    if selected.is_floating_point() or selected.dtype == torch.bool:
        raise ValueError(f"expected lists of integers, got {selected.dtype}")
    if selected.numel() and not (int(selected.min()) >= NO_KEY and int(selected.max()) < len(k)):
        raise ValueError(
            f"expected lists of keys 0 to {len(k) - 1}, or -1, got {int(selected.min())} to {int(selected.max())}"
        )
    if sink is not None and sink.shape != (q.shape[1],):
        raise ValueError(f"expected a sink for each of {q.shape[1]} heads, got shape {tuple(sink.shape)}")


@dataclass(frozen=True)
class RowLists:
    numbers: Tensor  # [T, K] int64, tokens of the row's request, counted from the first of its context, or NO_KEY
    query_start_loc: Starts

    @staticmethod
    def of(
        selected: Tensor | None, window: int | None, starts: Starts, context_lens: Sequence[int], device: torch.device
    ) -> "RowLists | None":
        """What a window shows of a selection [T, K], or of all; None where neither is given."""
        batch = zip(definition.segments(starts), context_lens, strict=True)
        places = [torch.arange(rows.stop - rows.start) + context for rows, context in batch]
        own = torch.cat(places).unsqueeze(1).to(device)  # [T, 1], the token that each row is
        if selected is not None:
            numbers = selected.long()
        elif window is not None:
            numbers = (own - torch.arange(window, device=device)).clamp(min=NO_KEY)
        else:
            return None
        if window is not None:
            numbers = numbers.masked_fill(numbers <= own - window, NO_KEY)
        return RowLists(numbers, starts)

    def keys(self, starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """[T, K] rows among the keys that hold the lengths[b] tokens from starts[b] on of each request b."""
        found = self.numbers.clone()
        for rows, start, length, key in zip(
            definition.segments(self.query_start_loc), starts, lengths, accumulate(lengths, initial=0), strict=False
        ):
            local = self.numbers[rows] - start
            found[rows] = torch.where((local >= 0) & (local < length), local + key, NO_KEY)
        return found


_LOW = torch.bfloat16
_KEYS_OF_A_LANE = 2**17  # gathered at a time for all rows, 1.7 GB of latents: 64 rows of 2,048, 128 heads fill a GPU


def over_lists(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, scale: float) -> definition.AttentionState | None:
    """The state of rows and the lists of keys that they name, for a GPU: the same values, near the machine's speed.

    Rows that name equally many keys are a batch of products, in which a row's heads are its queries. q: [T, N, D], k:
    [S, D] and v: [S, V] of any float dtype. None where operands are not finite, or sums leave the range.
    """
    state = row_sums.empty_state(len(q), q.shape[1], v.shape[1], q.device)
    for part in state.parts().values():
        part.zero_()
    state.lse.fill_(-torch.inf)  # stays so for rows that name no key
    counts, parts = (selected >= 0).sum(dim=1), []
    for count in counts.unique().tolist():
        if count:
            parts += (counts == count).nonzero()[:, 0].split(max(1, _KEYS_OF_A_LANE // count))
    extremes = torch.ones(len(parts), 2, dtype=torch.float64, device=q.device)
    of_queries, of_keys = row_sums.norms(q), row_sums.norms(k)

    def fill(rows: Tensor, reached: Tensor) -> Iterator[None]:
        """Write some rows into the state, and their sums' extremes; one step."""
        lists = selected[rows]
        named = lists[lists >= 0].view(len(rows), -1)
        bounds = abs(scale) * of_queries[rows].double() * of_keys[named].amax(dim=1).double()[:, None]
        shift = (bounds - row_sums.LARGEST_EXPONENT).clamp_(min=0.0).unsqueeze(-1)
        # In float32, or float64, which the kernel reads; exact.
        wide_q, wide_k = (x if x.dtype == torch.float64 else x.float() for x in (q[rows], k[named]))
        factor = torch.full((), scale, dtype=torch.float64, device=q.device)
        values = v[named]
        low_v = torch.empty(3 * len(values), *values.shape[1:], dtype=_LOW, device=v.device)
        absolute, same, squares = low_v.chunk(3)
        same.copy_(absolute.copy_(values).abs_())
        torch.square(absolute, out=squares)
        sums = row_sums.RowSums.zeros(shift, v.shape[1])
        queries = Queries(wide_q, factor, magnitudes(wide_q * scale, _LOW))
        sums.add(Tile(queries, TileKeys(wide_k, values.double(), magnitudes(k[named], _LOW), low_v), None))
        sums.absolute.copy_(absolute.sum(dim=1, keepdim=True, dtype=torch.float32))
        found = row_sums.empty_state(q.shape[1], len(rows), v.shape[1], q.device)
        row_sums.store(sums, _LOW, found)
        for whole, part in zip(state.parts().values(), found.parts().values(), strict=True):
            whole[rows] = part.transpose(0, 1)
        reached.copy_(sums.extremes())
        yield

    in_lanes(q.device, [fill(*work) for work in zip(parts, extremes, strict=True)])
    held = all(least >= row_sums.LEAST_SUM and math.isfinite(most) for least, most in extremes.tolist())
    return state if held else None
