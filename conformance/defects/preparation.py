"""Wrong preparations of index queries and keys: norm, rotation, transform, scales and codes, weights."""

import torch

from mla_conformance.backends.eager_prepare import EagerPrepareBackend
from mla_conformance.backends.prepare import BLOCK
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.quantization import E4M3_MAX

_EARLIER = ("prepare_index", "index_rotation", "index_norm", "index_hadamard")
"""What has cases of all steps, and stands before the capability that is about one of them."""


@known_defect("prepare-hadamard-missing", killed_by="index_hadamard", related=_EARLIER)
class WithoutTransform(EagerPrepareBackend):
    """Neither queries nor keys pass through the Hadamard transform."""

    def _transformed(self, x):
        return x


@known_defect("prepare-hadamard-missing-on-keys", killed_by="index_hadamard", related=_EARLIER)
class KeysUntransformed(EagerPrepareBackend):
    """Queries pass through the Hadamard transform, and keys do not."""

    def _transformed(self, x):
        return x if x.shape[1] == 1 and self.num_heads > 1 else super()._transformed(x)


@known_defect("prepare-hadamard-unnormalised", killed_by="index_hadamard", related=_EARLIER)
class UnnormalisedTransform(EagerPrepareBackend):
    """The Hadamard transform lacks the factor D^-1/2."""

    def _transformed(self, x):
        return super()._transformed(x) * x.shape[-1] ** 0.5


@known_defect("prepare-hadamard-before-rotation", killed_by="index_hadamard", related=_EARLIER)
class TransformsFirst(EagerPrepareBackend):
    """Queries and keys pass through the Hadamard transform before they are rotated."""

    def _turned(self, x):
        return self._rotated(self._transformed(x)) if self.preparation.hadamard else self._rotated(x)


@known_defect("prepare-hadamard-over-64-columns", killed_by="index_hadamard", related=_EARLIER)
class TransformsHalves(EagerPrepareBackend):
    """The butterflies stop at 64 columns, so that the halves of a head are transformed apart."""

    def _transformed(self, x):
        halves = x.unflatten(-1, (-1, min(64, x.shape[-1])))
        return super()._transformed(halves).flatten(-2)


@known_defect("prepare-largest-before-hadamard", killed_by="index_hadamard", related=_EARLIER)
class ScaledBeforeTransform(EagerPrepareBackend):
    """Scales are those of the values before the Hadamard transform, under which outliers saturate."""

    def _transformed(self, x):
        self._before = x.unflatten(-1, (-1, min(BLOCK, x.shape[-1])))
        return super()._transformed(x)

    def _largest(self, blocks):
        return super()._largest(self.__dict__.pop("_before", blocks))


@known_defect("prepare-neighbours-rotated-for-halves", killed_by="index_rotation", related=_EARLIER)
class RotatesNeighbours(EagerPrepareBackend):
    """Neighbours are rotated together, whatever the model's style is."""

    def _rope(self, x):
        preparation = self.preparation
        try:
            self.preparation = preparation._replace(is_neox_style=False)
            return super()._rope(x)
        finally:
            self.preparation = preparation


@known_defect("prepare-halves-rotated-for-neighbours", killed_by="index_rotation", related=_EARLIER)
class RotatesHalves(EagerPrepareBackend):
    """Columns R/2 apart are rotated together, whatever the model's style is."""

    def _rope(self, x):
        preparation = self.preparation
        try:
            self.preparation = preparation._replace(is_neox_style=True)
            return super()._rope(x)
        finally:
            self.preparation = preparation


@known_defect("prepare-keys-rotated-in-another-style", killed_by="index_rotation", related=_EARLIER)
class KeysInAnotherStyle(RotatesNeighbours):
    """Queries are rotated in the model's style, and keys in neighbours."""

    def _rope(self, x):
        return super()._rope(x) if x.shape[1] == 1 and self.num_heads > 1 else EagerPrepareBackend._rope(self, x)


@known_defect("prepare-first-columns-rotated", killed_by="index_rotation", related=_EARLIER)
class RotatesTheFirst(EagerPrepareBackend):
    """The first R columns are rotated where the model rotates the last."""

    def _rotated(self, x):
        width = self.preparation.rope_dim
        return torch.cat((self._rope(x[..., :width]), x[..., width:]), dim=-1)


@known_defect("prepare-rotates-backwards", killed_by="index_rotation", related=_EARLIER)
class RotatesBackwards(EagerPrepareBackend):
    """Pairs are turned by the negative of their angle."""

    def _turns(self, x):
        cos, sin = super()._turns(x)
        return cos, -sin


@known_defect("prepare-rotation-by-row", killed_by="prepare_index")
class RotatesByRow(EagerPrepareBackend):
    """A token is rotated by its row of the batch, not by its position."""

    def _turns(self, x):
        table = self._prepare_metadata.cos_sin_cache
        cos, sin = table[torch.arange(len(x), device=x.device) % len(table)].unsqueeze(1).chunk(2, dim=-1)
        return cos, sin


@known_defect("prepare-table-in-half", killed_by="index_rotation", related=_EARLIER)
class TableInHalf(EagerPrepareBackend):
    """Cosines and sines are held in the model's dtype, which is not declared."""

    def _turns(self, x):
        cos, sin = super()._turns(x)
        return cos.bfloat16().float(), sin.bfloat16().float()


@known_defect("prepare-norm-without-mean", killed_by="index_norm", related=_EARLIER)
class NormWithoutMean(EagerPrepareBackend):
    """Keys pass through an RMSNorm, which leaves their mean in them."""

    def _normed(self, k, weight, bias):
        return k * (k.square().mean(-1, keepdim=True) + self.preparation.eps).rsqrt() * weight + bias


@known_defect("prepare-norm-bias-dropped", killed_by="index_norm", related=_EARLIER)
class NormWithoutBias(EagerPrepareBackend):
    """The bias of the keys' norm is not added."""

    def _normed(self, k, weight, bias):
        return super()._normed(k, weight, torch.zeros_like(bias))


@known_defect("prepare-norm-eps-of-its-own", killed_by="index_norm")
class NormEpsOfItsOwn(EagerPrepareBackend):
    """The keys' norm adds 1e-5, whatever the model says."""

    def _normed(self, k, weight, bias):
        return torch.nn.functional.layer_norm(k, k.shape[-1:], weight, bias, 1e-5)


@known_defect("prepare-norm-eps-beside-the-root", killed_by="index_norm", related=_EARLIER)
class EpsBesideTheRoot(EagerPrepareBackend):
    """The keys' norm adds its epsilon to the deviation, not to the variance."""

    def _normed(self, k, weight, bias):
        deviation = k.std(-1, keepdim=True, correction=0) + self.preparation.eps
        return (k - k.mean(-1, keepdim=True)) / deviation * weight + bias


@known_defect("prepare-norm-of-samples", killed_by="index_norm", related=_EARLIER)
class NormOfSamples(EagerPrepareBackend):
    """The variance of keys is divided by D - 1."""

    def _normed(self, k, weight, bias):
        centred = k - k.mean(-1, keepdim=True)
        return centred * (k.var(-1, keepdim=True) + self.preparation.eps).rsqrt() * weight + bias


@known_defect("prepare-norm-parameters-in-half", killed_by="index_norm", related=_EARLIER)
class NormParametersInHalf(EagerPrepareBackend):
    """Weight and bias of the keys' norm are cast to bf16 before the launch."""

    def _normed(self, k, weight, bias):
        return super()._normed(k, weight.bfloat16().float(), bias.bfloat16().float())


@known_defect("prepare-intermediates-in-half", killed_by="prepare_index", related=_EARLIER)
class IntermediatesInHalf(EagerPrepareBackend):
    """What stands between the steps is rounded to bf16, which is not declared."""

    def _stored(self, x):
        return x.bfloat16().float()


@known_defect("prepare-key-stride-ignored", killed_by="prepare_index")
class ReadsPackedKeys(EagerPrepareBackend):
    """Keys are read as if no weights lay between them in the buffer of their projection."""

    def run_prepare_index(self, q, k, weights, k_norm_weight, k_norm_bias):
        packed = k.as_strided(k.shape, (k.shape[1], 1))
        return super().run_prepare_index(q, packed, weights, k_norm_weight, k_norm_bias)


@known_defect("prepare-powers-of-two-skipped", killed_by="index_scales", related=_EARLIER)
class SkipsPowers(EagerPrepareBackend):
    """Scales are not rounded to powers of two where the model's are."""

    def _power(self, scale):
        return scale


@known_defect("prepare-powers-of-two-skipped-for-queries", killed_by="index_scales", related=_EARLIER)
class SkipsPowersOfQueries(EagerPrepareBackend):
    """Scales of keys are rounded to powers of two, and those of queries are not."""

    def _power(self, scale):
        return super()._power(scale) if scale.shape[1] == 1 and self.num_heads > 1 else scale


@known_defect("prepare-powers-of-two-rounded-down", killed_by="index_scales", related=_EARLIER)
class RoundsPowersDown(EagerPrepareBackend):
    """Scales are rounded to the power of two below, so that the largest values saturate."""

    def _power(self, scale):
        return torch.exp2(scale.log2().floor())


@known_defect("prepare-scales-of-another-e4m3", killed_by="index_scales", related=_EARLIER)
class ScalesOfAnotherE4M3(EagerPrepareBackend):
    """Scales are the largest magnitude over 240, which is the largest code of e4m3fnuz."""

    def _largest(self, blocks):
        return super()._largest(blocks) * (E4M3_MAX / 240)


@known_defect("prepare-one-scale-for-all-heads", killed_by="index_scales", related=_EARLIER)
class OneScaleForAllHeads(EagerPrepareBackend):
    """All heads of a token share the scale of the largest."""

    def _scales(self, largest):
        return super()._scales(largest).amax(dim=1, keepdim=True).expand_as(largest)


@known_defect("prepare-scale-of-the-first-block", killed_by="index_hadamard", related=("index_scales",))
class ScaleOfTheFirstBlock(EagerPrepareBackend):
    """A head of several blocks of columns has the scale of the first in all of them."""

    def _scales(self, largest):
        return super()._scales(largest)[..., :1].expand_as(largest)


@known_defect("prepare-blocks-of-nothing", killed_by="index_norm", related=("index_scales",))
class DividesByNothing(EagerPrepareBackend):
    """A block of zeros has the scale 0, and its codes are NaN."""

    def _scales(self, largest):
        return super()._scales(largest).where(largest > 0, 0.0)


@known_defect("prepare-codes-truncated", killed_by="prepare_index", related=_EARLIER)
class TruncatesCodes(EagerPrepareBackend):
    """Codes are cut off, not rounded to the nearest."""

    def _quantised(self, x):
        codes, scale = super()._quantised(x)
        blocks = x.unflatten(-1, (scale.shape[-1], -1)) / scale.unsqueeze(-1)
        above = codes.float().abs() > blocks.flatten(-2).abs()
        bits = codes.view(torch.uint8)
        return torch.where(above, bits - 1, bits).view(codes.dtype), scale


@known_defect("prepare-weights-without-scale", killed_by="index_scales", related=_EARLIER)
class WeightsWithoutScale(EagerPrepareBackend):
    """Weights do not take the scales of the queries."""

    def _folded(self, weights, q_scale):
        return super()._folded(weights, torch.ones_like(q_scale))


@known_defect("prepare-weights-without-softmax-scale", killed_by="index_scales", related=_EARLIER)
class WeightsWithoutSoftmaxScale(EagerPrepareBackend):
    """Weights do not take the softmax scale."""

    def _folded(self, weights, q_scale):
        return weights * q_scale[..., 0] * self.num_heads**-0.5


@known_defect("prepare-weights-without-heads", killed_by="index_scales", related=_EARLIER)
class WeightsWithoutHeads(EagerPrepareBackend):
    """Weights do not take the factor H^-1/2."""

    def _folded(self, weights, q_scale):
        return weights * q_scale[..., 0] * self.scale


@known_defect("prepare-weights-in-half", killed_by="index_scales", related=_EARLIER)
class WeightsInHalf(EagerPrepareBackend):
    """Folded weights pass through bf16."""

    def _folded(self, weights, q_scale):
        return super()._folded(weights, q_scale).bfloat16().float()
