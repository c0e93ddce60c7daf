"""Suspects: mistakes that nobody needs to report, of the softmax, which any kernel may make, and of prefills."""

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import getsource
from itertools import pairwise, product
from typing import Any

import torch

from mla_conformance.backends.eager import EagerPrefillBackend, OnlineSoftmax
from mla_conformance.defects.known import before, behind, but, instead, kernels_of, known_defects, named_as_class
from mla_conformance.defects.prefills import LiftedMaximum

SuspectStep = type[OnlineSoftmax]
_BASE_2 = (
    *("lse-base2-merged-as-natural-prefix-chunk", "lse-base-switch-without-abi-change-cutedsl"),
    *("lse-base2-dcp-combine-flashinfer-mla", "sparse-lse-in-base-2"),
)
_PLUS_INF = ("sparse-keyless-lse-of-plus-inf",)
TILES = (16, 32, 64, 128)
LIFTED = tuple(id for id in known_defects() if id.endswith("-without-keys-raises-maximum"))
_KEYLESS = ("fa4-zero-len-k-hang-nan", "dcp-empty-owner-zero-times-nan", "sparse-keyless-row-not-written")


@dataclass(frozen=True)
class Suspect:
    wrong: Any  # a wrong kernel, or a wrong step of the softmax
    covers: tuple[str, ...] = ()  # ids of known defects that are the same mistake under some condition
    # values of some attributes: each combination is one mistake, all in one sentence, since a case seldom tells which
    of: Mapping[str, Sequence[object]] = field(default_factory=dict)
    said: str | None = None  # the sentence, if it is not the docstring


class _Softmax(OnlineSoftmax):
    scale_left_out = behind("scores", lambda self, scores: scores / self.scale)
    """The softmax scale is not applied."""
    scaled_twice = behind("scores", lambda self, scores: scores * self.scale)
    """The softmax scale is applied twice."""
    half_scale = behind("scores", lambda scores: scores / 2)
    """The softmax scale is half of the given one."""
    twice_the_scale = behind("scores", lambda scores: scores * 2)
    """The softmax scale is twice the given one."""
    flat_softmax = behind("scores", lambda scores: scores * math.log(2), covers=("mla-decode-scale-missing-log2e",))
    """Powers of two stand where powers of e should, without log2(e) in the scale."""
    steep_softmax = behind("scores", lambda scores: scores / math.log(2))
    """The scale has a factor log2(e), and powers of e are taken."""
    base2_lse = behind("finish", lse=lambda lse: lse / math.log(2), covers=_BASE_2)
    """The LSE is in base 2, expected the natural logarithm."""
    converted_twice = behind("finish", lse=lambda lse: lse * math.log(2))
    """The LSE is multiplied by ln 2, as if it had been in base 2."""
    lse_without_maximum = behind("finish", lambda output, _, *, state: (output, state.total.log().squeeze(-1)))
    """The LSE lacks the row's maximum: it is the logarithm of the shifted sum."""
    sum_in_base2 = behind("finish", lambda output, _, *, state: (output, (state.maximum + state.total.log2())[..., 0]))
    """The LSE adds log2 of the row sum to a natural maximum."""
    maximum_alone = behind("finish", lambda output, _, *, state: (output, state.maximum.squeeze(-1)))
    """The LSE is the row's maximum, without the logarithm of the row sum."""
    negated_lse = behind("finish", lse=lambda lse: torch.where(lse == -torch.inf, lse, -lse))
    """The LSE has the wrong sign."""
    bfloat_lse = behind("finish", lse=lambda lse: lse.bfloat16().float(), covers=("sparse-lse-in-the-models-dtype",))
    """The LSE is rounded to bf16."""
    half_lse = behind("finish", lse=lambda lse: lse.half().float(), covers=("sparse-lse-in-the-models-dtype",))
    """The LSE is rounded to fp16."""
    positive_infinity = behind("finish", lse=lambda x: x.masked_fill(x == -torch.inf, torch.inf), covers=_PLUS_INF)
    """The LSE of a row without keys is +inf."""
    zero_lse = behind("finish", lse=lambda lse: lse.masked_fill(lse == -torch.inf, 0.0))
    """The LSE of a row without keys is 0."""

    @but(covers=("skip-softmax-zero-len-div", "finite-neg-sentinel-rowmax-zeroes-row"))
    def no_keys__tiles(self, keys):
        """No key gets a weight: the output is 0 and the LSE -inf."""
        return iter(())

    def first_tile_twice__tiles(self, keys):
        """The first tile of keys is counted twice (a tile of 128, for example)."""
        tiles = list(super()._tiles(keys))
        return iter(tiles[:1] + tiles)

    def last_tile_dropped__tiles(self, keys):
        """The last, partly filled tile of keys is dropped (of tiles of 128, for example)."""
        return (tile for tile in super()._tiles(keys) if tile.stop - tile.start == self.key_tile)

    rotated_heads = behind("finish", lambda output, lse: (output.roll(1, 1), lse.roll(1, 0)))
    """Heads are rotated by one."""

    def normalised_twice__behind_finish(self, output, lse, *, state):
        """The output is divided by the row sum twice."""
        return (output / state.total.transpose(0, 1)).nan_to_num(nan=0.0), lse

    never_normalised = behind("finish", lambda _, lse, *, state: (state.weighted.transpose(0, 1), lse))
    """The output is not divided by the row sum."""


class DividesByZero(OnlineSoftmax):
    """The output of a row without keys is 0 / 0."""

    def _finish(self, state):
        _, lse = super()._finish(state)
        return (state.weighted / state.total).transpose(0, 1), lse


class NotRescaled(OnlineSoftmax):
    """The accumulator is not rescaled where a later tile of keys raises the row's maximum."""

    def _accumulate(self, state, scores, v):
        later = super()._accumulate(state._replace(weighted=torch.zeros_like(state.weighted)), scores, v)
        return later._replace(weighted=state.weighted + later.weighted)


class HeadTileUnwritten(OnlineSoftmax):
    """The last, partly filled tile of heads is not written (of tiles of 16 heads, for example)."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        written = max(output.shape[1] // self.head_tile, 1) * self.head_tile
        output[:, written:] = torch.nan
        if not self.writes_lse:
            lse[written:] = torch.nan
        return output, lse


def _causal(queries, keys, tile, device, *, shift, first=-1):
    """A causal mask that is off by ``shift``, where each query sees a ``first`` key at least."""
    last = (torch.arange(queries, device=device).unsqueeze(1) + keys - queries + shift).clamp(min=first)
    return torch.arange(tile.start, tile.stop, device=device) <= last


class _Prefill(EagerPrefillBackend):
    strict_mask = instead("visible", lambda self, *batch: _causal(*batch, shift=-1))
    """The causal mask is off by one: no query sees its own key, so that the first one sees none."""
    strict_mask_divides_by_zero = instead(
        "visible", lambda self, *batch: _causal(*batch, shift=-1), on=(DividesByZero,)
    )
    """The causal mask is off by one: no query sees its own key, and the first one's output is 0 / 0."""
    scale_of_head_dim = behind("scores", lambda self, scores, *, q: scores / self.scale * q.shape[-1] ** -0.5)
    """The softmax scale is (P + R)^-1/2, not the given one."""

    def scale_of_latent__scores(self, q, k):
        """The softmax scale is (L + R)^-1/2, not the given one."""
        return super()._scores(q, k) / self.scale * (self.kv_lora_rank + self.qk_rope_head_dim) ** -0.5

    leaked_key = instead("visible", lambda self, *batch: _causal(*batch, shift=1))
    """The causal mask is off by one: a query sees the key after its own."""
    hidden_key = instead("visible", lambda self, *batch: _causal(*batch, shift=-1, first=0))
    """The causal mask is off by one: a query does not see its own key."""

    def no_mask__visible(self, queries, keys, tile, device):
        """There is no causal mask."""
        return torch.ones(queries, tile.stop - tile.start, dtype=torch.bool, device=device)

    def first_key_dropped__behind_visible(self, visible, *, tile):
        """The first key of a request is dropped."""
        return visible & (torch.arange(tile.start, tile.stop, device=visible.device) > 0)

    def last_key_dropped__attend(self, q, k, v, causal):
        """The last key of a request is dropped."""
        kept = max(1, k.shape[0] - 1) if k.shape[0] else 0
        return super()._attend(q, k[:kept], v[:kept], causal and kept == k.shape[0])

    def last_page_dropped__attend(self, q, k, v, causal):
        """The last, partly filled page of a context's keys is dropped (of pages of 16, for example)."""
        kept = k.shape[0] if causal else k.shape[0] // 16 * 16
        return super()._attend(q, k[:kept], v[:kept], causal)

    def contiguous_values__before_batch(self, v):
        """V is read as if it were packed."""
        flat = v.as_strided((v.untyped_storage().nbytes() // v.element_size(),), (1,), 0)
        packed = flat[v.storage_offset() : v.storage_offset() + v.numel()]
        return torch.cat([packed, flat.new_zeros(v.numel() - packed.numel())]).view(v.shape)

    shifted_values = before("attend", lambda v: v.roll(1, -1))
    """V is sliced one column off."""

    @but(when=lambda key_start_loc: len(key_start_loc) > 2)
    def swapped_requests__before_batch(self, k, v, *, key_start_loc):
        """The keys of the first two requests are swapped."""
        a, b = key_start_loc[1:3]
        order = torch.cat([torch.arange(a, b), torch.arange(a), torch.arange(b, k.shape[0])])
        return k[order], v[order]

    def first_chunk_always__run_prefill_context_chunk(self, chunk_idx, q, k, v):
        """The chunk index is ignored: every chunk of a context is attended to with the lengths of the first one."""
        # Behind the keys of a shorter chunk stands what is no number.
        missing = int(self._prefill_metadata.chunked_context.cu_seq_lens[0][-1]) - k.shape[0]
        k, v = (torch.cat([x, x.new_full((max(missing, 0), *x.shape[1:]), torch.nan)]) for x in (k, v))
        kept = k.shape[0] + min(missing, 0)
        return super().run_prefill_context_chunk(0, q, k[:kept], v[:kept])

    def rows_never_written__behind_batch(self, output, lse):
        """Only the first rows are ever written (the first 64, for example)."""
        output[64:] = torch.nan

    output_scale_twice = before("quantise", lambda accumulated, *, output_scale: accumulated / output_scale)
    """The quantised output is divided by its scale twice."""
    output_scale_left_out = before("quantise", output_scale=torch.ones_like)
    """The quantised output is not divided by its scale."""


SUSPECTS: list[Suspect | SuspectStep] = [
    _Softmax,
    Suspect(DividesByZero, _KEYLESS),
    Suspect(LiftedMaximum, LIFTED, {"key_tile": TILES}),
    Suspect(NotRescaled, of={"key_tile": TILES}),
    Suspect(HeadTileUnwritten, of={"head_tile": (16, 32, 64), "writes_lse": (True, False)}),
    _Prefill,
]
"""Mistakes, and groups of them, in the order in which they are tried."""


def each_of(entry: Suspect | SuspectStep) -> Iterator[tuple[SuspectStep, tuple[str, ...]]]:
    """The mistakes of an entry, each where a reference finds it, with what it covers."""
    if isinstance(entry, type):
        (group,) = ast.parse(getsource(entry)).body
        assert isinstance(group, ast.ClassDef)
        said = {}  # what is written behind the rows, by their names as classes
        for row, text in pairwise(group.body):
            match row, text:
                case ast.Assign(targets=[ast.Name(id=key)]), ast.Expr(value=ast.Constant(value=str(written))):
                    said[named_as_class(key)] = written
        for wrong in kernels_of(entry, named_as_class):
            wrong.__doc__ = said.get(wrong.__name__, wrong.__doc__)
            yield wrong, getattr(wrong, "covers", ())
    elif not entry.of and not entry.said:
        yield entry.wrong, entry.covers
    else:
        for chosen in product(*entry.of.values()):
            name = "Of".join([entry.wrong.__name__, *map(str, chosen)])
            named = {"__doc__": entry.said or entry.wrong.__doc__, "__module__": __name__}
            globals()[name] = type(name, (entry.wrong,), {**named, **dict(zip(entry.of, chosen, strict=True))})
            yield globals()[name], entry.covers
