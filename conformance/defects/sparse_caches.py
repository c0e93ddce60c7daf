"""A second cache that is dropped, bounded by the lists of the first, addressed by its pages, or merged wrongly."""

from dataclasses import replace

from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.defects.known import known_defect
from mla_conformance.defects.split_keys import joined


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

    def _merged(self, states):
        raise NotImplementedError


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
