"""EAGER, preparation: index queries and keys to codes in plain PyTorch, step by step in float32."""

import torch
from torch import Tensor

from mla_conformance.backends import online_softmax, prepare
from mla_conformance.reference.indexer import sylvester
from mla_conformance.reference.quantization import E4M3_MAX

_LEAST = 1e-10


def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Tensor:
    """[..., R] with pairs turned by their cosines and sines [..., R/2]: columns R/2 apart, or neighbours."""
    a, b = x.chunk(2, dim=-1) if is_neox_style else (x[..., 0::2], x[..., 1::2])
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat(turned, dim=-1) if is_neox_style else torch.stack(turned, dim=-1).flatten(-2)


class EagerPrepareBackend(online_softmax.Eager, prepare.MLAPrepareBackend):
    def run_prepare_index(
        self, q: Tensor, k: Tensor, weights: Tensor, k_norm_weight: Tensor, k_norm_bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        prepare.check_prepare_call(self, self._prepare_metadata, (q, k, weights, k_norm_weight, k_norm_bias))
        query = self._turned(self._query(q))
        key = self._turned(self._normed(k.float(), k_norm_weight, k_norm_bias).unsqueeze(1))
        q_codes, q_scale = self._quantised(query)
        k_codes, k_scale = self._quantised(key)
        last = self._folded(weights.float(), q_scale) if self.preparation.fold_scales else q_scale
        return q_codes, k_codes[:, 0], k_scale[:, 0], last

    def _query(self, q: Tensor) -> Tensor:
        return q.float()

    def _normed(self, k: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(k, k.shape[-1:], weight, bias, self.preparation.eps)

    def _turned(self, x: Tensor) -> Tensor:
        rotated = self._stored(self._rotated(x))
        return self._stored(self._transformed(rotated)) if self.preparation.hadamard else rotated

    def _stored(self, x: Tensor) -> Tensor:
        return x

    def _rotated(self, x: Tensor) -> Tensor:
        width = self.preparation.rope_dim
        first = 0 if self.preparation.rope_first else x.shape[-1] - width
        before, part, behind = x.tensor_split([first, first + width], dim=-1)
        return torch.cat((before, self._rope(part), behind), dim=-1)

    def _rope(self, x: Tensor) -> Tensor:
        return rotated_pairs(x, *self._turns(x), self.preparation.is_neox_style)

    def _turns(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._prepare_metadata.cos_sin_cache[self._prepare_metadata.positions].unsqueeze(1).chunk(2, dim=-1)
        return cos, sin

    def _transformed(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        signs = sylvester(width, x.device).sign().float()
        return (x @ signs) * width**-0.5

    def _quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = x.unflatten(-1, (-1, min(prepare.BLOCK, x.shape[-1])))
        scale = self._scales(self._largest(blocks))
        codes = (blocks / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return codes.flatten(-2), scale

    def _largest(self, blocks: Tensor) -> Tensor:
        return blocks.abs().amax(dim=-1)

    def _scales(self, largest: Tensor) -> Tensor:
        scale = largest.clamp(min=_LEAST) / E4M3_MAX
        return self._power(scale) if self.preparation.scale_format == "pow2" else scale

    def _power(self, scale: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(scale)
        return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())

    def _folded(self, weights: Tensor, q_scale: Tensor) -> Tensor:
        return weights * q_scale[..., 0] * (self.scale * self.num_heads**-0.5)
