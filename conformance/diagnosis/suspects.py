"""Suspects: mistakes that nobody needs to report; here those of the softmax, which a kernel of any role may make."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from mla_conformance.backends.online_softmax import OnlineSoftmax
from mla_conformance.defects.prefills import LiftedMaximum

SuspectStep = type[OnlineSoftmax]


@dataclass(frozen=True)
class Suspect:
    """A mistake.

    Attributes:
        wrong: a wrong kernel, or a wrong step of the softmax.
        family: the kind of fault, named as the families of the known defects.
        covers: ids of known defects that are the same mistake under some condition.
    """

    wrong: SuspectStep
    family: str
    covers: tuple[str, ...]


SUSPECTS: list[Suspect] = []


def suspect(family: str, *covers: str) -> Callable[[SuspectStep], SuspectStep]:
    """Class decorator that enters a mistake; :class:`Suspect` has the arguments."""

    def enter(wrong: SuspectStep) -> SuspectStep:
        SUSPECTS.append(Suspect(wrong, family, covers))
        return wrong

    return enter


@suspect("scale")
class ScaleLeftOut(OnlineSoftmax):
    """The softmax scale is not applied."""

    def _scores(self, q, k):
        return super()._scores(q, k) / self.scale


@suspect("scale")
class ScaledTwice(OnlineSoftmax):
    """The softmax scale is applied twice."""

    def _scores(self, q, k):
        return super()._scores(q, k) * self.scale


@suspect("scale", "mla-decode-scale-missing-log2e")
class FlatSoftmax(OnlineSoftmax):
    """Powers of two stand where powers of e should, without log2(e) in the scale."""

    def _scores(self, q, k):
        return super()._scores(q, k) * math.log(2)


@suspect("scale")
class SteepSoftmax(OnlineSoftmax):
    """The scale has a factor log2(e), and powers of e are taken."""

    def _scores(self, q, k):
        return super()._scores(q, k) / math.log(2)


@suspect(
    "lse",
    "lse-base2-merged-as-natural-prefix-chunk",
    "lse-base-switch-without-abi-change-cutedsl",
    "lse-base2-dcp-combine-flashinfer-mla",
    "sparse-lse-in-base-2",
)
class Base2Lse(OnlineSoftmax):
    """The LSE is in base 2, expected the natural logarithm."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse / math.log(2)


@suspect("lse")
class ConvertedTwice(OnlineSoftmax):
    """The LSE is multiplied by ln 2, as if it had been in base 2."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse * math.log(2)


@suspect("lse")
class LseWithoutMaximum(OnlineSoftmax):
    """The LSE lacks the row's maximum: it is the logarithm of the shifted sum."""

    def _finish(self, state):
        output, _ = super()._finish(state)
        return output, state.total.log().squeeze(-1)


@suspect("lse")
class SumInBase2(OnlineSoftmax):
    """The LSE adds log2 of the row sum to a natural maximum."""

    def _finish(self, state):
        output, _ = super()._finish(state)
        return output, (state.maximum + state.total.log2()).squeeze(-1)


@suspect("lse")
class MaximumAlone(OnlineSoftmax):
    """The LSE is the row's maximum, without the logarithm of the row sum."""

    def _finish(self, state):
        output, _ = super()._finish(state)
        return output, state.maximum.squeeze(-1)


@suspect("lse")
class NegatedLse(OnlineSoftmax):
    """The LSE has the wrong sign."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, torch.where(lse == -torch.inf, lse, -lse)


@suspect("lse", "sparse-lse-in-the-models-dtype")
class BfloatLse(OnlineSoftmax):
    """The LSE is rounded to bf16."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse.bfloat16().float()


@suspect("lse", "sparse-lse-in-the-models-dtype")
class HalfLse(OnlineSoftmax):
    """The LSE is rounded to fp16."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse.half().float()


@suspect("lse", "sparse-keyless-lse-of-plus-inf")
class PositiveInfinity(OnlineSoftmax):
    """The LSE of a row without keys is +inf."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse.masked_fill(lse == -torch.inf, torch.inf)


@suspect("lse")
class ZeroLse(OnlineSoftmax):
    """The LSE of a row without keys is 0."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse.masked_fill(lse == -torch.inf, 0.0)


@suspect("lse", "fa4-zero-len-k-hang-nan", "dcp-empty-owner-zero-times-nan", "sparse-keyless-row-not-written")
class DividesByZero(OnlineSoftmax):
    """The output of a row without keys is 0 / 0."""

    def _finish(self, state):
        _, lse = super()._finish(state)
        return (state.weighted / state.total).transpose(0, 1), lse


@suspect("lse", "skip-softmax-zero-len-div", "finite-neg-sentinel-rowmax-zeroes-row")
class NoKeys(OnlineSoftmax):
    """No key gets a weight: the output is 0 and the LSE -inf."""

    def _tiles(self, keys):
        return iter(())


@suspect("indexing")
class FirstTileTwice(OnlineSoftmax):
    """The first tile of keys is counted twice (a tile of 128, for example)."""

    def _tiles(self, keys):
        tiles = list(super()._tiles(keys))
        return iter(tiles[:1] + tiles)


@suspect("indexing")
class LastTileDropped(OnlineSoftmax):
    """The last, partly filled tile of keys is dropped (of tiles of 128, for example)."""

    def _tiles(self, keys):
        return (tile for tile in super()._tiles(keys) if tile.stop - tile.start == self.key_tile)


@suspect("indexing")
class RotatedHeads(OnlineSoftmax):
    """Heads are rotated by one."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output.roll(1, 1), lse.roll(1, 0)


_LIFTED = (
    "decode-tile-of-32-without-keys-raises-maximum",
    "decode-tile-of-64-without-keys-raises-maximum",
    "decode-tile-of-128-without-keys-raises-maximum",
    "prefill-tile-of-64-without-keys-raises-maximum",
    "prefill-tile-of-128-without-keys-raises-maximum",
    "sparse-tile-of-32-without-keys-raises-maximum",
    "sparse-tile-of-64-without-keys-raises-maximum",
    "sparse-tile-of-128-without-keys-raises-maximum",
    "layer-tile-without-keys-raises-maximum",
)


def suspect_each(
    wrong: SuspectStep, family: str, *covers: str, said: str | None = None, **values: Sequence[object]
) -> None:
    """Enter a mistake with each combination of values of some attributes, in one sentence: a case seldom tells which.

    Args:
        wrong: the mistake.
        family: as of :class:`Suspect`.
        covers: as of :class:`Suspect`.
        said: the sentence; the mistake's own by default.
        values: the values of each attribute.
    """
    for chosen in product(*values.values()):
        name = "Of".join([wrong.__name__, *map(str, chosen)])
        named = {"__doc__": said or wrong.__doc__, "__module__": __name__, **dict(zip(values, chosen, strict=True))}
        globals()[name] = suspect(family, *covers)(type(name, (wrong,), named))


def suspect_tiles(wrong: SuspectStep, *sizes: int) -> None:
    """Enter a mistake of tiles without keys with each size."""
    suspect_each(wrong, "tiles", *_LIFTED, said=LiftedMaximum.__doc__, key_tile=sizes)


suspect_tiles(LiftedMaximum, 16, 32, 64, 128)


class NotRescaled(OnlineSoftmax):
    """The accumulator is not rescaled where a later tile of keys raises the row's maximum."""

    def _accumulate(self, state, scores, v):
        later = super()._accumulate(state._replace(weighted=torch.zeros_like(state.weighted)), scores, v)
        return later._replace(weighted=state.weighted + later.weighted)


suspect_each(NotRescaled, "tiles", key_tile=(16, 32, 64, 128))


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


suspect_each(HeadTileUnwritten, "indexing", head_tile=(16, 32, 64), writes_lse=(True, False))


@suspect("precision")
class NormalisedTwice(OnlineSoftmax):
    """The output is divided by the row sum twice."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return (output / state.total.transpose(0, 1)).nan_to_num(nan=0.0), lse


@suspect("precision")
class NeverNormalised(OnlineSoftmax):
    """The output is not divided by the row sum."""

    def _finish(self, state):
        _, lse = super()._finish(state)
        return state.weighted.transpose(0, 1), lse
