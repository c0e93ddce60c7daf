"""A layer that holds or multiplies the weights of its projections in less than the model's dtype."""

import torch

from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.defects.eager_layer import EagerLayer
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.quantization import E4M3_MAX


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
