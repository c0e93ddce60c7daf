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


class _KeepsPadding(MLACommonState):
    def prepare_graph_input_buffers(self, input_buffers, attn_metadata, is_encoder_decoder_model=False):
        names = ("seq_lens_tensor", "seq_lens_cpu", "block_tables")
        before = {name: input_buffers[name].clone() for name in names}
        super().prepare_graph_input_buffers(input_buffers, attn_metadata, is_encoder_decoder_model)
        for name in names:
            input_buffers[name][attn_metadata.num_decode_tokens :] = before[name][attn_metadata.num_decode_tokens :]


@known_defect("graph-padding-keeps-the-sequences-before", killed_by="graph_replay")
class SequencesOfTheBatchBefore(EagerLayer):
    """Rows that a replay does not need keep the lengths and blocks of the batch before, and return its attention."""

    @staticmethod
    def get_state_cls():
        return _KeepsPadding


class _LoadsLengthsOnce(MLACommonState):
    _first = None

    def prepare_graph_input_buffers(self, input_buffers, attn_metadata, is_encoder_decoder_model=False):
        super().prepare_graph_input_buffers(input_buffers, attn_metadata, is_encoder_decoder_model)
        lengths = {name: input_buffers[name] for name in ("seq_lens_tensor", "seq_lens_cpu")}
        if self._first is None:
            self._first = {name: buffer.clone() for name, buffer in lengths.items()}
        rows = slice(attn_metadata.num_decode_tokens)
        for name, buffer in lengths.items():
            buffer[rows] = self._first[name][rows]


@known_defect("graph-replays-the-lengths-of-the-first-batch", killed_by="graph_replay")
class LengthsOfTheFirstBatch(EagerLayer):
    """Rows that a replay needs keep the lengths that the first one loaded."""

    @staticmethod
    def get_state_cls():
        return _LoadsLengthsOnce
