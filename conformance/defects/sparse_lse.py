"""What a row over selected keys adds up to: its LSE, its sink, its keys of a second cache."""

import math
from dataclasses import replace

import torch

from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.defects.bases import joined
from mla_conformance.defects.known import known_defect

_SHAPES_TOO = ("model_shapes",)
"""It comes before, and has lists of every kind."""


class _Lse(EagerSparseBackend):
    """Returns another LSE; the sinks have taken their share by the right one."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        return output, self._returned(lse)


@known_defect("sparse-lse-in-base-2", killed_by="sparse_lse", related=_SHAPES_TOO)
class LseInBase2(_Lse):
    """The LSE is in base 2."""

    def _returned(self, lse):
        return lse / math.log(2)


@known_defect("sparse-lse-in-the-models-dtype", killed_by="sparse_lse", related=_SHAPES_TOO)
class LseInTheModelsDtype(_Lse):
    """The LSE is kept in the model's dtype and widened at last."""

    def _returned(self, lse):
        return lse.to(self._model_dtype).float()


@known_defect("sparse-lse-of-tokens-by-heads", killed_by="sparse_lse", related=_SHAPES_TOO)
class LseOfTokensByHeads(_Lse):
    """The LSE has the shape of heads by tokens and the order of tokens by heads."""

    def _returned(self, lse):
        return lse.mT.contiguous().view(lse.shape)


@known_defect("sparse-keyless-lse-of-plus-inf", killed_by="selection_padding", related=("sparse_lse",))
class KeylessPlusInfinity(_Lse):
    """The LSE of a row whose list names nothing is +inf."""

    def _returned(self, lse):
        return lse.masked_fill(lse == -torch.inf, torch.inf)


@known_defect("sparse-keyless-row-not-written", killed_by="selection_padding", related=("sparse_lse",))
class KeylessNotWritten(EagerSparseBackend):
    """A row whose list names nothing is skipped, and holds what the buffer held."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        return output.masked_fill((lse == -torch.inf).mT.unsqueeze(-1), torch.nan), lse


_PADDED_TOO = ("selection_padding",)
"""Some of its cases have sinks."""


@known_defect("sparse-sinks-dropped", killed_by="attention_sinks", related=_PADDED_TOO)
class SinksDropped(EagerSparseBackend):
    """Sinks are not handed on to the kernel."""

    def _with_sink(self, output, lse, sink):
        return output


@known_defect("xqa-sm12x-sinks-gibberish", killed_by="attention_sinks", related=_PADDED_TOO)
class SinkWithAValue(EagerSparseBackend):
    """A sink's share of the weights is not left out, but takes the output of the row before."""

    def _with_sink(self, output, lse, sink):
        shared = super()._with_sink(output, lse, sink)
        return shared + (output - shared).roll(1, dims=0)


@known_defect("sparse-lse-with-the-sink", killed_by="attention_sinks", related=_PADDED_TOO)
class LseWithTheSink(EagerSparseBackend):
    """The LSE counts the sink among the keys."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        return output, lse if sink is None else torch.logaddexp(lse, sink.unsqueeze(1))


@known_defect("sparse-sink-in-the-lse-alone", killed_by="attention_sinks", related=_PADDED_TOO)
class SinkInTheLseAlone(LseWithTheSink):
    """A sink is counted in the LSE and leaves the output as it is."""

    def _with_sink(self, output, lse, sink):
        return output


@known_defect("sparse-sink-of-the-head-before", killed_by="attention_sinks", related=_PADDED_TOO)
class SinkOfTheHeadBefore(EagerSparseBackend):
    """Each head takes the sink of the one before it."""

    def _with_sink(self, output, lse, sink):
        return super()._with_sink(output, lse, None if sink is None else sink.roll(1))


@known_defect("sparse-sink-in-base-2", killed_by="attention_sinks", related=_PADDED_TOO)
class SinkInBase2(EagerSparseBackend):
    """A sink enters the powers of two of the scores without log2(e)."""

    def _with_sink(self, output, lse, sink):
        return super()._with_sink(output, lse, None if sink is None else sink * math.log(2))


@known_defect("sink-counted-twice-or-never-in-splitkv", killed_by="attention_sinks", related=_PADDED_TOO)
class SinkOfEachSplit(EagerSparseBackend):
    """A sink counts in each of two splits of a list, and once more where they are merged."""

    def _with_sink(self, output, lse, sink):
        return super()._with_sink(output, lse, None if sink is None else sink + math.log(2))


@known_defect("sparse-keyless-row-beside-a-sink-nan", killed_by="selection_padding")
class KeylessBesideASink(EagerSparseBackend):
    """The share of a row without keys beside a sink is 0 / 0."""

    def _with_sink(self, output, lse, sink):
        shared = super()._with_sink(output, lse, sink)
        return shared if sink is None else shared.masked_fill((lse == -torch.inf).mT.unsqueeze(-1), torch.nan)


@known_defect("sparse-second-cache-dropped", killed_by="second_cache")
class SecondDropped(EagerSparseBackend):
    """Keys of the second cache are left out."""

    def attend(self, q, sources, k_scale, sink):
        return super().attend(q, sources[:1], k_scale, sink)


@known_defect("sparse-second-cache-by-the-first-lengths", killed_by="second_cache")
class LengthsOfTheFirst(EagerSparseBackend):
    """The lists of the second cache end where those of the first do."""

    def attend(self, q, sources, k_scale, sink):
        first = sources[0].length
        return super().attend(q, [replace(each, length=first) for each in sources], k_scale, sink)


@known_defect("sparse-second-cache-by-the-first-pages", killed_by="second_cache")
class PagesOfTheFirst(EagerSparseBackend):
    """Slots of the second cache are found by the page size of the first."""

    def _slots(self, source, request):
        slots = super()._slots(source, request)
        page = self._page if hasattr(self, "_page") else source.cache.shape[1]
        block = (slots // page).clamp(max=source.cache.shape[0] - 1)
        return block * source.cache.shape[1] + slots % page % source.cache.shape[1]

    def attend(self, q, sources, k_scale, sink):
        self._page = sources[0].cache.shape[1]
        return super().attend(q, sources, k_scale, sink)


class _Apart(EagerSparseBackend):
    """Each cache is attended to by itself."""

    def _attend(self, q, request, sources, k_scale):
        return self._merged([super(_Apart, self)._attend(q, request, [each], k_scale) for each in sources])


@known_defect("sparse-two-caches-averaged", killed_by="second_cache")
class Averaged(_Apart):
    """The outputs over both caches are averaged, not weighed by their LSEs."""

    def _merged(self, states):
        if len(states) == 1:
            return states[0]
        whole = joined(*states)
        outputs = [(each.weighted / each.total).nan_to_num(0.0) for each in states]
        return whole._replace(weighted=sum(outputs) / 2 * whole.total)


@known_defect("sparse-lse-of-the-first-cache", killed_by="second_cache")
class LseOfTheFirst(_Apart):
    """The LSE is that of the first cache; the output counts both."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        return output, super().attend(q, sources[:1], k_scale, sink)[1] if len(sources) > 1 else lse

    def _merged(self, states):
        return states[0] if len(states) == 1 else joined(*states)
