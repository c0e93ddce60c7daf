"""A layer that does not use its weights, or not in their dtype, or whose graph runs over what an earlier batch left."""

import torch

from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.backends.layer.mla_state import MLACommonState
from mla_conformance.defects.bases import EagerLayer
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.quantization import E4M3_MAX


@known_defect("gguf-weights-never-absorbed", killed_by="weight_absorption")
class DenseWeightsOnly(EagerLayer):
    """Weights of another name are never absorbed, and the first decode finds none."""

    class impl_class(MLACommonImpl):
        def process_weights_after_loading(self, act_dtype):
            if hasattr(self.kv_b_proj, "weight"):
                super().process_weights_after_loading(act_dtype)


@known_defect("prefix-kv-stale-after-weight-update", killed_by="weight_absorption")
class AbsorbedOnce(EagerLayer):
    """Absorbed weights are copies that stay as they are when the weights are replaced."""

    class impl_class(MLACommonImpl):
        def process_weights_after_loading(self, act_dtype):
            if hasattr(self, "W_UV"):
                return
            super().process_weights_after_loading(act_dtype)
            self.W_UK_T, self.W_UV = self.W_UK_T.clone(), self.W_UV.clone()


class _KeepsSlots(MLACommonState):
    def prepare_graph_input_buffers(self, input_buffers, attn_metadata, is_encoder_decoder_model=False):
        slots = input_buffers["slot_mapping"]
        before = slots.clone()
        super().prepare_graph_input_buffers(input_buffers, attn_metadata, is_encoder_decoder_model)
        slots[attn_metadata.num_decode_tokens :] = before[attn_metadata.num_decode_tokens :]


@known_defect("dsa-dummy-run-stale-slots", killed_by="graph_replay")
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


def _as_codes(weight):
    """The weights of e4m3 codes with one scale."""
    scale = weight.abs().max().float() / E4M3_MAX
    return ((weight / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


@known_defect("layer-absorbs-weights-in-e4m3", killed_by="mixed_batch")
class AbsorbedInCodes(EagerLayer):
    """The absorbed weights of decode are kept in e4m3, those of prefill as they came."""

    class impl_class(MLACommonImpl):
        def process_weights_after_loading(self, act_dtype):
            super().process_weights_after_loading(act_dtype)
            self.W_UK_T, self.W_UV = _as_codes(self.W_UK_T), _as_codes(self.W_UV)


@known_defect("layer-multiplies-context-out-in-e4m3", killed_by="mixed_batch")
class MultipliedOutInCodes(EagerLayer):
    """Prefill multiplies latents out with weights that were rounded to e4m3."""

    class impl_class(MLACommonImpl):
        def _up_project(self, kv_c, k_pe):
            exact = torch.cat((self.W_UK_T.transpose(1, 2), self.W_UV), dim=-1)
            kv = torch.einsum("sl,nlc->snc", kv_c, _as_codes(exact))
            k_nope, v = kv.tensor_split([self.qk_nope_head_dim], dim=-1)
            return torch.cat((k_nope, k_pe.unsqueeze(1).expand(-1, self.num_heads, -1)), dim=-1), v


@known_defect("layer-accumulates-projections-in-the-model-dtype", killed_by="mixed_batch")
class SummedInTheModelDtype(EagerLayer):
    """The output is projected with sums that are rounded to the model's dtype after every product."""

    class impl_class(MLACommonImpl):
        def _v_up_proj(self, x):
            total = x.new_zeros(x.shape[1], x.shape[0], self.v_head_dim)
            for latent in range(self.kv_lora_rank):
                total += x[..., latent].mT.unsqueeze(-1) * self.W_UV[:, latent].unsqueeze(1)
            return total.transpose(0, 1).flatten(1)


@known_defect("layer-absorbs-weights-of-sixteen-heads", killed_by="mixed_batch")
class SixteenHeads(EagerLayer):
    """Weights are absorbed in tiles of 16 heads, and every tile takes those of the first."""

    class impl_class(MLACommonImpl):
        def process_weights_after_loading(self, act_dtype):
            super().process_weights_after_loading(act_dtype)
            first = torch.arange(self.num_heads) % 16
            self.W_UK_T, self.W_UV = self.W_UK_T[first], self.W_UV[first]
