"""Wrong selections of given logits: windows, keys that order otherwise, ties, places that are filled wrongly."""

import torch

from mla_conformance.backends.eager_topk import LEAST, EagerTopKBackend
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.selected import NO_KEY

_NAN = 0x7FC00000


@known_defect("topk-start-ignored", killed_by="select_windows")
class IgnoresStarts(EagerTopKBackend):
    """Every row is read from column 0 on, wherever its window starts."""

    def _windows(self, logits):
        starts, lengths = super()._windows(logits)
        return torch.zeros_like(starts), lengths


@known_defect("topk-start-rounded-to-vectors", killed_by="select_windows")
class RoundsStarts(EagerTopKBackend):
    """Windows start at the last whole vector of four columns before them."""

    def _windows(self, logits):
        starts, lengths = super()._windows(logits)
        return starts // 4 * 4, lengths


@known_defect("topk-columns-of-the-logits-named", killed_by="select_windows")
class NamesAbsoluteColumns(EagerTopKBackend):
    """Columns of the logits are named where those of the row's window are declared."""

    def _told(self, chosen, starts):
        return chosen


@known_defect("topk-length-of-the-next-row", killed_by="select")
class LengthOfTheNextRow(EagerTopKBackend):
    """Each row is read as far as the next one should be."""

    def _windows(self, logits):
        starts, lengths = super()._windows(logits)
        return starts, lengths.roll(-1, dims=0).minimum(logits.shape[1] - starts)


@known_defect("topk-reads-to-the-end-of-a-tile", killed_by="select", related=("select_windows",))
class ReadsWholeTiles(EagerTopKBackend):
    """The last tile of 64 columns is read to its end, whatever stands behind the row."""

    def _windows(self, logits):
        starts, lengths = super()._windows(logits)
        return starts, (-(-lengths // 64) * 64).minimum(logits.shape[1] - starts)


@known_defect("topk-tail-of-vectors-unread", killed_by="select")
class WholeVectorsOnly(EagerTopKBackend):
    """Columns behind a row's last whole vector of four are not read."""

    def _windows(self, logits):
        starts, lengths = super()._windows(logits)
        return starts, lengths // 4 * 4


@known_defect("topk-row-stride-ignored", killed_by="select_windows")
class ReadsPackedRows(EagerTopKBackend):
    """Rows are read as if none but their columns lay between them."""

    def _keys(self, logits):
        return super()._keys(logits.as_strided(logits.shape, (logits.shape[1], 1)))


@known_defect("topk-first-2048-columns", killed_by="select")
class FirstColumnsOnly(EagerTopKBackend):
    """Only the first 2,048 columns of a row are candidates."""

    def _windows(self, logits):
        starts, lengths = super()._windows(logits)
        return starts, lengths.clamp(max=2048)


@known_defect("topk-column-in-two-bytes", killed_by="select")
class ColumnsInTwoBytes(EagerTopKBackend):
    """A column is carried in 16 bits, and beyond 65,535 another one is named."""

    def _choose(self, keys, topk_tokens):
        chosen = super()._choose(keys, topk_tokens)
        return torch.where(chosen == NO_KEY, NO_KEY, chosen & 0xFFFF)


@known_defect("topk-short-rows-copied-whole", killed_by="select")
class ShortRowsWhole(EagerTopKBackend):
    """A row that is no longer than the list gets the numbers from 0 on, -1 never."""

    def _told(self, chosen, starts):
        told, places = super()._told(chosen, starts), torch.arange(chosen.shape[1], device=chosen.device)
        return torch.where((chosen == NO_KEY).any(dim=1, keepdim=True), places, told)


@known_defect("topk-one-column-more-than-places", killed_by="select")
class FirstOfOneMore(EagerTopKBackend):
    """The search for a threshold does not settle where a row has one column too many, and its first ones are taken."""

    def _choose(self, keys, topk_tokens):
        chosen, places = super()._choose(keys, topk_tokens), torch.arange(topk_tokens, device=keys.device)
        first = (keys != LEAST).int().argmax(dim=1, keepdim=True)
        one_more = (keys != LEAST).sum(dim=1, keepdim=True) == topk_tokens + 1
        return torch.where(one_more, first + places, chosen)


@known_defect("topk-stale-places", killed_by="select")
class StalePlaces(EagerTopKBackend):
    """Places that a row does not fill hold what the row before it left in shared memory."""

    def _told(self, chosen, starts):
        told = super()._told(chosen, starts)
        return torch.where(told == NO_KEY, told.roll(1, dims=0), told)


@known_defect("topk-padding-in-front", killed_by="select")
class PaddingInFront(EagerTopKBackend):
    """-1 stands before the columns, where whoever reads as many as a row has finds it."""

    def _choose(self, keys, topk_tokens):
        chosen = super()._choose(keys, topk_tokens)
        order = (chosen != NO_KEY).int().argsort(dim=1, stable=True)
        return chosen.gather(1, order)


@known_defect("topk-places-beyond-1024-unfilled", killed_by="select")
class PlacesBeyond1024(EagerTopKBackend):
    """A block sorts 1,024 candidates, and the places behind them stay empty."""

    def _choose(self, keys, topk_tokens):
        chosen = super()._choose(keys, topk_tokens)
        chosen[:, 1024:] = NO_KEY
        return chosen


@known_defect("topk-bits-of-negatives-unflipped", killed_by="select_ties", related=("select", "select_windows"))
class NegativesUnflipped(EagerTopKBackend):
    """Keys are the bits as integers, by which the least of all negative logits is the largest."""

    def _keys(self, logits):
        return logits.float().view(torch.int32).long()


@known_defect("topk-negative-zero-least", killed_by="select_ties")
class NegativeZeroLeast(EagerTopKBackend):
    """-0 has the key of the least negative integer, below every logit."""

    def _keys(self, logits):
        zero = (logits == 0) & logits.signbit()
        return super()._keys(logits).masked_fill(zero, LEAST + 1)


@known_defect("topk-coarse-bins-alone", killed_by="select_ties", related=("select", "select_windows"))
class CoarseBinsAlone(EagerTopKBackend):
    """Logits are told apart by the first 12 bits of their keys, as the first pass of a radix selection does."""

    def _keys(self, logits):
        return super()._keys(logits) >> 20


@known_defect("topk-keys-of-halves", killed_by="select_ties", related=("select", "select_windows"))
class KeysOfHalves(EagerTopKBackend):
    """The coarse bin is that of the logit in fp16, beyond whose range all logits fall into one."""

    def _keys(self, logits):
        return super()._keys(logits.half().float())


class _FewCandidates(EagerTopKBackend):
    """Of a threshold's coarse bin so many candidates are kept, whichever come first."""

    kept = 4096
    shift = 20

    def _choose(self, keys, topk_tokens):
        bins = keys >> self.shift
        threshold = bins.topk(min(topk_tokens, keys.shape[1]), dim=1).values[:, -1:]
        tied = (bins == threshold) & (keys != LEAST)
        return super()._choose(keys.masked_fill(tied & (tied.cumsum(dim=1) > self.kept), LEAST), topk_tokens)


@known_defect("topk-threshold-bin-of-4096", killed_by="select_ties", related=("select",))
class ThresholdBinOf4096(_FewCandidates):
    """Of the coarse bin that holds the threshold 4,096 candidates are kept, though others are larger."""


@known_defect("topk-ties-of-1024", killed_by="select_ties", related=("select",))
class TiesOf1024(_FewCandidates):
    """Of the logits that tie with the last one selected 1,024 are kept, and places beyond them hold -1."""

    kept = 1024
    shift = 0


@known_defect("topk-ties-found-by-their-value", killed_by="select_ties", related=("select", "select_windows"))
class FindsTiesByValue(EagerTopKBackend):
    """The largest logits are found first and then looked up, so that equal ones are one and the same column."""

    def _choose(self, keys, topk_tokens):
        chosen = super()._choose(keys, topk_tokens)
        found = keys.gather(1, chosen.clamp(min=0))
        same = torch.nn.functional.pad(found[:, 1:] == found[:, :-1], (1, 0)) & (chosen != NO_KEY)
        for column in range(1, topk_tokens):
            chosen[:, column] = torch.where(same[:, column], chosen[:, column - 1], chosen[:, column])
        return chosen


@known_defect("topk-infinities-left-out", killed_by="select_ties")
class LeavesInfinitiesOut(EagerTopKBackend):
    """A logit of -inf is taken for what is behind a mask, and -1 is told for it."""

    def _keys(self, logits):
        return super()._keys(logits).masked_fill(logits == -torch.inf, LEAST)


@known_defect("topk-infinity-overflows-the-bins", killed_by="select_ties")
class InfinityBeyondTheBins(EagerTopKBackend):
    """The bin of +inf is beyond the last one that is counted, and its logits are lost."""

    def _keys(self, logits):
        return super()._keys(logits).masked_fill(logits == torch.inf, LEAST)


@known_defect("topk-lanes-behind-the-row", killed_by="select_ties", related=("select", "select_windows"))
class CountsPhantomLanes(EagerTopKBackend):
    """Lanes of the last vector behind a row are filled with -inf and counted, as good as a logit of -inf is."""

    def _choose(self, keys, topk_tokens):
        columns = torch.arange(keys.shape[1], device=keys.device)
        seen = keys != LEAST
        end = (columns * seen).amax(dim=1, keepdim=True) + 1
        masked = keys.masked_fill(~seen, torch.iinfo(torch.int64).max).amin(dim=1, keepdim=True)
        lanes = (columns >= end) & (columns < -(-end // 8) * 8)
        low = (masked <= -0x7F800000) & (masked > LEAST)
        flipped = super()._choose(keys.masked_fill(lanes & low, -0x7F800000).flip(1), topk_tokens)
        return torch.where(flipped == NO_KEY, NO_KEY, keys.shape[1] - 1 - flipped)


@known_defect("topk-bits-of-nan-named", killed_by="select_ties")
class NamesTheBitsOfNaN(EagerTopKBackend):
    """In a row that holds NaN what is sorted is the logit, and its bits are told in the place of its column."""

    def _keys(self, logits):
        self._strange = logits.isnan()
        return super()._keys(logits)

    def _told(self, chosen, starts):
        told = super()._told(chosen, starts)
        nan = self._strange.gather(1, chosen.clamp(min=0)) & (chosen != NO_KEY)
        return told.masked_fill(nan, _NAN)


@known_defect("topk-ties-by-who-comes-first", killed_by="determinism")
class TiesInAnyOrder(EagerTopKBackend):
    """Now and then another block comes first to where the last of several equal logits is taken."""

    def _choose(self, keys, topk_tokens):
        self.number = getattr(self, "number", 0) + 1
        if self.number % 7:
            return super()._choose(keys, topk_tokens)
        mirrored = super()._choose(keys.flip(1), topk_tokens)
        return torch.where(mirrored == NO_KEY, NO_KEY, keys.shape[1] - 1 - mirrored)
