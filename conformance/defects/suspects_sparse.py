"""Suspects of attention to selected keys: ends of lists, sinks, and the scale of a cache of e4m3 codes."""

from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.defects.candidates import suspect


@suspect("sparse_lists")
class LastKeyOfAListDropped(EagerSparseBackend):
    """The last key of each list is dropped."""

    def _listed(self, source):
        listed = super()._listed(source)
        return listed & (listed.cumsum(1) < listed.sum(dim=1, keepdim=True))


@suspect("sparse_lists")
class FirstKeyOfAListDropped(EagerSparseBackend):
    """The first key of each list is dropped."""

    def _listed(self, source):
        listed = super()._listed(source)
        return listed & (listed.cumsum(1) > 1)


@suspect("sparse_sinks")
class SinkSubtracted(EagerSparseBackend):
    """A sink has the wrong sign."""

    def _with_sink(self, output, lse, sink):
        return super()._with_sink(output, lse, None if sink is None else -sink)


@suspect("sparse_entries")
class KeyScaleOfListsTwice(EagerSparseBackend):
    """The scale of the e4m3 cache is applied to selected keys twice."""

    def _keys(self, source, slots, visible, k_scale):
        return super()._keys(source, slots, visible, k_scale * k_scale)
