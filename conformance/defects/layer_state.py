"""A layer that remembers what an earlier call had, or leaves its result where a later one writes."""

from mla_conformance.backends.layer.mla_builder import MLACommonMetadataBuilder
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.defects.eager_layer import EagerLayer
from mla_conformance.defects.known import known_defect


@known_defect("layer-keeps-the-scale-of-its-first-call", killed_by="call_order")
class ScaleOfTheFirstCall(EagerLayer):
    """The cache's scale is read at the first call and kept."""

    class impl_class(MLACommonImpl):
        _kept = None

        def forward(self, layer, *operands, **outputs):
            self._kept = layer if self._kept is None else self._kept
            return super().forward(self._kept, *operands, **outputs)


@known_defect("layer-plans-context-once-for-as-many-prefills", killed_by="call_order")
class PlanOfTheBatchBefore(EagerLayer):
    """The chunks of the context are those of the last batch with as many prefills."""

    class builder_class(MLACommonMetadataBuilder):
        def _plan(self, context_lens):
            self._plans = getattr(self, "_plans", {})
            return self._plans.setdefault(len(context_lens), super()._plan(context_lens))


@known_defect("layer-returns-its-own-buffer", killed_by="no_side_effects")
class ResultInABuffer(EagerLayer):
    """The result is a part of a buffer that the next call writes again."""

    class impl_class(MLACommonImpl):
        _buffer = None

        def forward(self, *operands, **outputs):
            result = super().forward(*operands, **outputs)
            if outputs:
                return result
            if self._buffer is None:
                self._buffer = result.new_empty(4 * len(result), result.shape[1])
            return self._buffer[: len(result)].copy_(result)


@known_defect("layer-ignores-the-output-buffer", killed_by="mixed_batch")
class OutputIgnored(EagerLayer):
    """An output buffer is taken and left unwritten, the result is a tensor of its own."""

    class impl_class(MLACommonImpl):
        def forward(self, *operands, **outputs):
            return super().forward(*operands)


@known_defect("layer-adds-to-the-output-buffer", killed_by="mixed_batch")
class OutputAddedTo(EagerLayer):
    """The result is added to what the output buffer holds, as if it began as zeros."""

    class impl_class(MLACommonImpl):
        def forward(self, *operands, output=None):
            result = super().forward(*operands)
            return result if output is None else output.add_(result)
