"""Wrong preparations of index queries and keys: norm, rotation, transform, scales and codes, weights."""

import torch

from mla_conformance.backends.eager_prepare import EagerPrepareBackend, rotated_pairs
from mla_conformance.backends.prepare import BLOCK
from mla_conformance.defects.bases import packed_rows
from mla_conformance.defects.known import Defects, before, behind, but, instead, together
from mla_conformance.reference.quantization import E4M3_MAX

_EARLIER = ("prepare_index", "index_rotation", "index_norm", "index_hadamard")
"""What has cases of all steps, and stands before the capability that is about one of them."""


def _of_keys(self, x):
    """Whether they are keys, which have one head."""
    return x.shape[1] == 1 and self.num_heads > 1


class _IndexHadamard(EagerPrepareBackend, Defects, killed_by="index_hadamard", related=_EARLIER):
    prepare_hadamard_missing = instead("transformed", lambda self, x: x)
    """Neither queries nor keys pass through the Hadamard transform."""
    prepare_hadamard_missing_on_keys = instead("transformed", lambda self, x: x, when=_of_keys)
    """Queries pass through the Hadamard transform, and keys do not."""
    prepare_hadamard_unnormalised = behind("transformed", lambda transformed, *, x: transformed * x.shape[-1] ** 0.5)
    """The Hadamard transform lacks the factor D^-1/2."""
    prepare_largest_before_hadamard = together(
        before(
            "transformed", lambda self, x: self.__dict__.update(_before=x.unflatten(-1, (-1, min(BLOCK, x.shape[-1]))))
        ),
        before("largest", lambda self, blocks: self.__dict__.pop("_before", blocks)),
    )
    """Scales are those of the values before the Hadamard transform, under which outliers saturate."""

    def prepare_hadamard_before_rotation__turned(self, x):
        """Queries and keys pass through the Hadamard transform before they are rotated."""
        return self._rotated(self._transformed(x)) if self.preparation.hadamard else self._rotated(x)

    def prepare_hadamard_over_64_columns__transformed(self, x):
        """The butterflies stop at 64 columns, so that the halves of a head are transformed apart."""
        return super()._transformed(x.unflatten(-1, (-1, min(64, x.shape[-1])))).flatten(-2)


class _IndexRotation(EagerPrepareBackend, Defects, killed_by="index_rotation", related=_EARLIER):
    def _rope_in(self, x, is_neox_style):
        return rotated_pairs(x, *self._turns(x), is_neox_style)

    prepare_neighbours_rotated_for_halves = instead("rope", lambda self, x: self._rope_in(x, False))
    """Neighbours are rotated together, whatever the model's style is."""
    prepare_halves_rotated_for_neighbours = instead("rope", lambda self, x: self._rope_in(x, True))
    """Columns R/2 apart are rotated together, whatever the model's style is."""
    prepare_keys_rotated_in_another_style = instead("rope", lambda self, x: self._rope_in(x, False), when=_of_keys)
    """Queries are rotated in the model's style, and keys in neighbours."""
    prepare_rotates_backwards = behind("turns", lambda cos, sin: (cos, -sin))
    """Pairs are turned by the negative of their angle."""
    prepare_table_in_half = behind("turns", lambda cos, sin: (cos.bfloat16().float(), sin.bfloat16().float()))
    """Cosines and sines are held in the model's dtype, which is not declared."""

    def prepare_first_columns_rotated__rotated(self, x):
        """The first R columns are rotated where the model rotates the last."""
        width = self.preparation.rope_dim
        return torch.cat((self._rope(x[..., :width]), x[..., width:]), dim=-1)


class _IndexNorm(EagerPrepareBackend, Defects, killed_by="index_norm", related=_EARLIER):
    prepare_norm_bias_dropped = before("normed", bias=torch.zeros_like)
    """The bias of the keys' norm is not added."""

    def prepare_norm_without_mean__normed(self, k, weight, bias):
        """Keys pass through an RMSNorm, which leaves their mean in them."""
        return k * (k.square().mean(-1, keepdim=True) + self.preparation.eps).rsqrt() * weight + bias

    def prepare_norm_eps_beside_the_root__normed(self, k, weight, bias):
        """The keys' norm adds its epsilon to the deviation, not to the variance."""
        deviation = k.std(-1, keepdim=True, correction=0) + self.preparation.eps
        return (k - k.mean(-1, keepdim=True)) / deviation * weight + bias

    def prepare_norm_of_samples__normed(self, k, weight, bias):
        """The variance of keys is divided by D - 1."""
        centred = k - k.mean(-1, keepdim=True)
        return centred * (k.var(-1, keepdim=True) + self.preparation.eps).rsqrt() * weight + bias

    def prepare_norm_parameters_in_half__normed(self, k, weight, bias):
        """Weight and bias of the keys' norm are cast to bf16 before the launch."""
        return super()._normed(k, weight.bfloat16().float(), bias.bfloat16().float())


class _OtherPrepare(EagerPrepareBackend, Defects, killed_by="prepare_index"):
    prepare_intermediates_in_half = instead("stored", lambda self, x: x.bfloat16().float(), related=_EARLIER)
    """What stands between the steps is rounded to bf16, which is not declared."""
    prepare_key_stride_ignored = before("run_prepare_index", k=packed_rows)
    """Keys are read as if no weights lay between them in the buffer of their projection."""
    prepare_scale_of_the_first_block = behind(
        "scales",
        lambda scales: scales[..., :1].expand_as(scales),
        killed_by="index_hadamard",
        related=("index_scales",),
    )
    """A head of several blocks of columns has the scale of the first in all of them."""

    def prepare_rotation_by_row__turns(self, x):
        """A token is rotated by its row of the batch, not by its position."""
        table = self._prepare_metadata.cos_sin_cache
        cos, sin = table[torch.arange(len(x), device=x.device) % len(table)].unsqueeze(1).chunk(2, dim=-1)
        return cos, sin

    @but(killed_by="index_norm")
    def prepare_norm_eps_of_its_own__normed(self, k, weight, bias):
        """The keys' norm adds 1e-5, whatever the model says."""
        return torch.nn.functional.layer_norm(k, k.shape[-1:], weight, bias, 1e-5)

    @but(killed_by="index_norm", related=("index_scales",))
    def prepare_blocks_of_nothing__scales(self, largest):
        """A block of zeros has the scale 0, and its codes are NaN."""
        return super()._scales(largest).where(largest > 0, 0.0)

    @but(related=_EARLIER)
    def prepare_codes_truncated__behind_quantised(self, codes, scale, *, x):
        """Codes are cut off, not rounded to the nearest."""
        blocks = x.unflatten(-1, (scale.shape[-1], -1)) / scale.unsqueeze(-1)
        above = codes.float().abs() > blocks.flatten(-2).abs()
        return (codes.view(torch.uint8) - above.to(torch.uint8)).view(codes.dtype), scale


class _IndexScales(EagerPrepareBackend, Defects, killed_by="index_scales", related=_EARLIER):
    prepare_powers_of_two_skipped = instead("power", lambda self, scale: scale)
    """Scales are not rounded to powers of two where the model's are."""
    prepare_powers_of_two_rounded_down = instead("power", lambda self, scale: torch.exp2(scale.log2().floor()))
    """Scales are rounded to the power of two below, so that the largest values saturate."""
    prepare_scales_of_another_e4m3 = behind("largest", lambda largest: largest * (E4M3_MAX / 240))
    """Scales are the largest magnitude over 240, which is the largest code of e4m3fnuz."""
    prepare_weights_without_scale = before("folded", q_scale=torch.ones_like)
    """Weights do not take the scales of the queries."""
    prepare_weights_in_half = behind("folded", lambda folded: folded.bfloat16().float())
    """Folded weights pass through bf16."""
    prepare_one_scale_for_all_heads = behind(
        "scales", lambda scales: scales.amax(dim=1, keepdim=True).expand_as(scales)
    )
    """All heads of a token share the scale of the largest."""
    prepare_weights_without_heads = instead("folded", lambda self, weights, scale: weights * scale[..., 0] * self.scale)
    """Weights do not take the factor H^-1/2."""

    def prepare_powers_of_two_skipped_for_queries__power(self, scale):
        """Scales of keys are rounded to powers of two, and those of queries are not."""
        return super()._power(scale) if scale.shape[1] == 1 and self.num_heads > 1 else scale

    def prepare_weights_without_softmax_scale__folded(self, weights, q_scale):
        """Weights do not take the softmax scale."""
        return weights * q_scale[..., 0] * self.num_heads**-0.5
