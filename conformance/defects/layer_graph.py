"""A layer whose graph runs over what an earlier batch has left in its buffers."""

from mla_conformance.backends.layer.mla_state import MLACommonState
from mla_conformance.defects.eager_layer import EagerLayer
from mla_conformance.defects.known import known_defect


class _KeepsSlots(MLACommonState):
    def prepare_graph_input_buffers(self, input_buffers, attn_metadata, is_encoder_decoder_model=False):
        slots = input_buffers["slot_mapping"]
        before = slots.clone()
        super().prepare_graph_input_buffers(input_buffers, attn_metadata, is_encoder_decoder_model)
        slots[attn_metadata.num_decode_tokens :] = before[attn_metadata.num_decode_tokens :]


@known_defect(
    "dsa-dummy-run-stale-slots",
    killed_by="graph_replay",
    sources=("vllm-project/vllm-ascend#11832",),
)
class SlotsOfTheBatchBefore(EagerLayer):
    """Rows that a replay does not need keep their slots of the batch before, and are written there."""

    @staticmethod
    def get_state_cls():
        return _KeepsSlots
