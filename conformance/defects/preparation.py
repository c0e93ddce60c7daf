"""Wrong preparations of index queries and keys: norm, rotation, transform, scales and codes, weights."""

import torch

from mla_conformance.backends.eager_prepare import EagerPrepareBackend, rotated_pairs
from mla_conformance.backends.prepare import BLOCK
from mla_conformance.defects.bases import note, packed
from mla_conformance.defects.known import Defects, before, behind, instead, together
from mla_conformance.reference.quantization import E4M3_MAX


def _of_keys(self, x):
    """Whether they are keys, which have one head."""
    return x.shape[1] == 1 and self.num_heads > 1


def _in_half(x):
    return x.bfloat16().float()


def _rope_in(self, x, is_neox_style):
    return rotated_pairs(x, *self._turns(x), is_neox_style)


class _Prepare(EagerPrepareBackend, Defects):
    prepare_hadamard_missing = instead("transformed", lambda self, x: x)
    prepare_hadamard_missing_on_keys = instead("transformed", lambda self, x: x, when=_of_keys)
    prepare_hadamard_unnormalised = behind("transformed", lambda transformed, *, x: transformed * x.shape[-1] ** 0.5)
    prepare_largest_before_hadamard = together(
        before("transformed", lambda self, x: note(self, given=x.unflatten(-1, (-1, min(BLOCK, x.shape[-1]))))),
        before("largest", lambda self, blocks: self.__dict__.pop("given", blocks)),
    )

    def prepare_hadamard_before_rotation__turned(self, x):
        return self._rotated(self._transformed(x)) if self.preparation.hadamard else self._rotated(x)

    def prepare_hadamard_over_64_columns__transformed(self, x):
        return super()._transformed(x.unflatten(-1, (-1, min(64, x.shape[-1])))).flatten(-2)

    prepare_neighbours_rotated_for_halves = instead("rope", lambda self, x: _rope_in(self, x, False))
    prepare_halves_rotated_for_neighbours = instead("rope", lambda self, x: _rope_in(self, x, True))
    prepare_keys_rotated_in_another_style = instead("rope", lambda self, x: _rope_in(self, x, False), when=_of_keys)
    prepare_rotates_backwards = behind("turns", lambda cos, sin: (cos, -sin))
    prepare_table_in_half = behind("turns", lambda cos, sin: (_in_half(cos), _in_half(sin)))

    def prepare_first_columns_rotated__rotated(self, x):
        width = self.preparation.rope_dim
        return torch.cat((self._rope(x[..., :width]), x[..., width:]), dim=-1)

    prepare_norm_bias_dropped = before("normed", bias=torch.zeros_like)

    def prepare_norm_without_mean__normed(self, k, weight, bias):
        return k * (k.square().mean(-1, keepdim=True) + self.preparation.eps).rsqrt() * weight + bias

    def prepare_norm_eps_beside_the_root__normed(self, k, weight, bias):
        deviation = k.std(-1, keepdim=True, correction=0) + self.preparation.eps
        return (k - k.mean(-1, keepdim=True)) / deviation * weight + bias

    def prepare_norm_of_samples__normed(self, k, weight, bias):
        centred = k - k.mean(-1, keepdim=True)
        return centred * (k.var(-1, keepdim=True) + self.preparation.eps).rsqrt() * weight + bias

    prepare_norm_parameters_in_half = before("normed", weight=_in_half, bias=_in_half)
    prepare_intermediates_in_half = instead("stored", lambda self, x: _in_half(x))
    prepare_key_stride_ignored = before("run_prepare_index", k=packed)
    prepare_scale_of_the_first_block = behind("scales", lambda scales: scales[..., :1].expand_as(scales))

    def prepare_rotation_by_row__turns(self, x):
        table = self._prepare_metadata.cos_sin_cache
        return table[torch.arange(len(x), device=x.device) % len(table)].unsqueeze(1).chunk(2, dim=-1)

    def prepare_norm_eps_of_its_own__normed(self, k, weight, bias):
        return torch.nn.functional.layer_norm(k, k.shape[-1:], weight, bias, 1e-5)

    prepare_blocks_of_nothing = behind("scales", lambda scales, *, largest: scales.where(largest > 0, 0.0))

    def prepare_codes_truncated__behind_quantised(self, codes, scale, *, x):
        blocks = x.unflatten(-1, (scale.shape[-1], -1)) / scale.unsqueeze(-1)
        above = codes.float().abs() > blocks.flatten(-2).abs()
        return (codes.view(torch.uint8) - above.to(torch.uint8)).view(codes.dtype), scale

    prepare_powers_of_two_skipped = instead("power", lambda self, scale: scale)
    prepare_powers_of_two_rounded_down = instead("power", lambda self, scale: torch.exp2(scale.log2().floor()))
    prepare_scales_of_another_e4m3 = behind("largest", lambda largest: largest * (E4M3_MAX / 240))
    prepare_weights_without_scale = before("folded", q_scale=torch.ones_like)
    prepare_weights_in_half = behind("folded", _in_half)
    prepare_one_scale_for_all_heads = behind("scales", lambda scales: scales.amax(1, keepdim=True).expand_as(scales))
    prepare_weights_without_heads = instead("folded", lambda self, weights, scale: weights * scale[..., 0] * self.scale)

    def prepare_powers_of_two_skipped_for_queries__power(self, scale):
        return super()._power(scale) if scale.shape[1] == 1 and self.num_heads > 1 else scale

    def prepare_weights_without_softmax_scale__folded(self, weights, q_scale):
        return weights * q_scale[..., 0] * self.num_heads**-0.5
