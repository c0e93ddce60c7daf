"""Suspects: mistakes that nobody needs to report; here those of the softmax, which a kernel of any role may make."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch

from mla_conformance.backends.eager import OnlineSoftmax
from mla_conformance.defects.known import but, kernels_of, named_as_class
from mla_conformance.defects.prefills import LiftedMaximum

SuspectStep = type[OnlineSoftmax]
_BASE_2 = (
    *("lse-base2-merged-as-natural-prefix-chunk", "lse-base-switch-without-abi-change-cutedsl"),
    *("lse-base2-dcp-combine-flashinfer-mla", "sparse-lse-in-base-2"),
)
LIFTED = (
    *(f"decode-tile-of-{size}-without-keys-raises-maximum" for size in (32, 64, 128)),
    *(f"prefill-tile-of-{size}-without-keys-raises-maximum" for size in (64, 128)),
    *(f"sparse-tile-of-{size}-without-keys-raises-maximum" for size in (32, 64, 128)),
    "layer-tile-without-keys-raises-maximum",
)


@dataclass(frozen=True)
class Suspect:
    wrong: SuspectStep  # a wrong kernel, or a wrong step of the softmax
    covers: tuple[str, ...] = ()  # ids of known defects that are the same mistake under some condition
    # values of some attributes: each combination is one mistake, all in one sentence, since a case seldom tells which
    of: Mapping[str, Sequence[object]] = field(default_factory=dict)
    said: str | None = None  # the sentence, if it is not the docstring


class _Softmax(OnlineSoftmax):
    def scale_left_out__scores(self, q, k):
        """The softmax scale is not applied."""
        return super()._scores(q, k) / self.scale

    def scaled_twice__scores(self, q, k):
        """The softmax scale is applied twice."""
        return super()._scores(q, k) * self.scale

    def half_scale__scores(self, q, k):
        """The softmax scale is half of the given one."""
        return super()._scores(q, k) / 2

    def twice_the_scale__scores(self, q, k):
        """The softmax scale is twice the given one."""
        return super()._scores(q, k) * 2

    @but(covers=("mla-decode-scale-missing-log2e",))
    def flat_softmax__scores(self, q, k):
        """Powers of two stand where powers of e should, without log2(e) in the scale."""
        return super()._scores(q, k) * math.log(2)

    def steep_softmax__scores(self, q, k):
        """The scale has a factor log2(e), and powers of e are taken."""
        return super()._scores(q, k) / math.log(2)

    @but(covers=_BASE_2)
    def base2_lse__behind_finish(self, output, lse):
        """The LSE is in base 2, expected the natural logarithm."""
        return output, lse / math.log(2)

    def converted_twice__behind_finish(self, output, lse):
        """The LSE is multiplied by ln 2, as if it had been in base 2."""
        return output, lse * math.log(2)

    def lse_without_maximum__behind_finish(self, output, _, *, state):
        """The LSE lacks the row's maximum: it is the logarithm of the shifted sum."""
        return output, state.total.log().squeeze(-1)

    def sum_in_base2__behind_finish(self, output, _, *, state):
        """The LSE adds log2 of the row sum to a natural maximum."""
        return output, (state.maximum + state.total.log2()).squeeze(-1)

    def maximum_alone__behind_finish(self, output, _, *, state):
        """The LSE is the row's maximum, without the logarithm of the row sum."""
        return output, state.maximum.squeeze(-1)

    def negated_lse__behind_finish(self, output, lse):
        """The LSE has the wrong sign."""
        return output, torch.where(lse == -torch.inf, lse, -lse)

    @but(covers=("sparse-lse-in-the-models-dtype",))
    def bfloat_lse__behind_finish(self, output, lse):
        """The LSE is rounded to bf16."""
        return output, lse.bfloat16().float()

    @but(covers=("sparse-lse-in-the-models-dtype",))
    def half_lse__behind_finish(self, output, lse):
        """The LSE is rounded to fp16."""
        return output, lse.half().float()

    @but(covers=("sparse-keyless-lse-of-plus-inf",))
    def positive_infinity__behind_finish(self, output, lse):
        """The LSE of a row without keys is +inf."""
        return output, lse.masked_fill(lse == -torch.inf, torch.inf)

    def zero_lse__behind_finish(self, output, lse):
        """The LSE of a row without keys is 0."""
        return output, lse.masked_fill(lse == -torch.inf, 0.0)

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

    def rotated_heads__behind_finish(self, output, lse):
        """Heads are rotated by one."""
        return output.roll(1, 1), lse.roll(1, 0)

    def normalised_twice__behind_finish(self, output, lse, *, state):
        """The output is divided by the row sum twice."""
        return (output / state.total.transpose(0, 1)).nan_to_num(nan=0.0), lse

    def never_normalised__behind_finish(self, _, lse, *, state):
        """The output is not divided by the row sum."""
        return state.weighted.transpose(0, 1), lse


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

    head_tile: int
    writes_lse: bool

    def _finish(self, state):
        output, lse = super()._finish(state)
        written = max(output.shape[1] // self.head_tile, 1) * self.head_tile
        output[:, written:] = torch.nan
        if not self.writes_lse:
            lse[written:] = torch.nan
        return output, lse


SUSPECTS: list[Suspect | SuspectStep] = [
    _Softmax,
    Suspect(
        DividesByZero,
        covers=("fa4-zero-len-k-hang-nan", "dcp-empty-owner-zero-times-nan", "sparse-keyless-row-not-written"),
    ),
    Suspect(LiftedMaximum, LIFTED, {"key_tile": (16, 32, 64, 128)}),
    Suspect(NotRescaled, of={"key_tile": (16, 32, 64, 128)}),
    Suspect(HeadTileUnwritten, of={"head_tile": (16, 32, 64), "writes_lse": (True, False)}),
]
"""Mistakes, and groups of them, in the order in which they are tried; those of other modules stand behind."""


def each_of(entry: Suspect | SuspectStep) -> Iterator[tuple[SuspectStep, tuple[str, ...]]]:
    """The mistakes of an entry, each where a reference finds it, with what it covers."""
    if isinstance(entry, type):
        yield from ((wrong, about["covers"]) for wrong, about in kernels_of(entry, named_as_class, covers=()))
    elif not entry.of:
        yield entry.wrong, entry.covers
    else:
        for chosen in product(*entry.of.values()):
            name = "Of".join([entry.wrong.__name__, *map(str, chosen)])
            named = {"__doc__": entry.said or entry.wrong.__doc__, "__module__": __name__}
            globals()[name] = type(name, (entry.wrong,), {**named, **dict(zip(entry.of, chosen, strict=True))})
            yield globals()[name], entry.covers
