"""Honest top-k and preparations of index queries and keys that differ legitimately from EAGER's."""

from heapq import nlargest
from typing import ClassVar

import torch

from mla_conformance.backends.declaration import Declaration, Precision, SelectionForm, SelectionOrder, Ties
from mla_conformance.backends.eager_prepare import EagerPrepareBackend
from mla_conformance.backends.eager_topk import LEAST, EagerTopKBackend
from mla_conformance.backends.kernel import KernelBackend
from mla_conformance.defects.bases import emulations
from mla_conformance.defects.known import but, kernels
from mla_conformance.reference.prepare_index import sylvester
from mla_conformance.reference.quantization import E4M3_MAX
from mla_conformance.reference.selected import NO_KEY


def _selects(**declared: object) -> Declaration:
    return Declaration(selection=SelectionForm(**declared), emulated=True)  # type: ignore[arg-type]


def _placed(chosen: torch.Tensor, topk_tokens: int) -> torch.Tensor:
    """Columns of a mask [T, C] in their order, -1 behind them."""
    columns = torch.arange(chosen.shape[1], device=chosen.device).masked_fill(~chosen, chosen.shape[1])
    first = columns.sort(dim=1).values[:, :topk_tokens]
    first = torch.nn.functional.pad(first, (0, topk_tokens - first.shape[1]), value=chosen.shape[1])
    return first.masked_fill(first == chosen.shape[1], NO_KEY)


@kernels()
class _TopK(EagerTopKBackend):
    @but(declaration=_selects(order=SelectionOrder.ASCENDING, ties=Ties.LAST))
    def radix_selection__choose(self, keys, topk_tokens):
        """Histograms of eight bits after another find the threshold; of those that tie with it the last ones are
        taken."""
        bits = (keys + 2**32).where(keys != LEAST, 0)
        left = (keys != LEAST).sum(dim=1).clamp(max=topk_tokens)
        prefix = torch.zeros_like(left)
        for shift in range(32, -1, -8):
            digit = torch.where((bits >> (shift + 8)) == prefix.unsqueeze(1), bits >> shift & 0xFF, -1)
            counts = keys.new_zeros(len(keys), 257).scatter_add_(1, digit + 1, torch.ones_like(digit))[:, 1:]
            above = counts.flip(1).cumsum(dim=1).flip(1) - counts
            found = ((above < left.unsqueeze(1)) & (above + counts >= left.unsqueeze(1))).int().argmax(dim=1)
            left = left - above.gather(1, found.unsqueeze(1))[:, 0]
            prefix = prefix << 8 | found
        tied = (bits == prefix.unsqueeze(1)) & (keys != LEAST)
        taken = tied.flip(1).cumsum(dim=1).flip(1) <= left.unsqueeze(1)
        return _placed((bits > prefix.unsqueeze(1)) | (tied & taken), topk_tokens)

    @but(declaration=_selects(order=SelectionOrder.DESCENDING, ties=Ties.FIRST))
    def sorted_rows__choose(self, keys, topk_tokens):
        """Rows are sorted as a whole, equal logits by their columns."""
        ordered = keys.sort(dim=1, descending=True, stable=True)
        chosen = ordered.indices.masked_fill(ordered.values == LEAST, NO_KEY)[:, :topk_tokens]
        return torch.nn.functional.pad(chosen, (0, topk_tokens - chosen.shape[1]), value=NO_KEY)

    @but(declaration=_selects(order=SelectionOrder.DESCENDING))
    def heap_of_each_row__choose(self, keys, topk_tokens):
        """A heap of the best goes over each row."""
        chosen = torch.full((len(keys), topk_tokens), NO_KEY)
        for row, values in enumerate(keys.tolist()):
            seen = ((key, column) for column, key in enumerate(values) if key != LEAST)
            best = [column for _, column in nlargest(topk_tokens, seen)]
            chosen[row, : len(best)] = torch.tensor(best, dtype=torch.int64)
        return chosen.to(keys.device)

    @but(declaration=_selects())
    def split_rows__choose(self, keys, topk_tokens):
        """The best of every 256 columns, and of those the best: ties fall as the splits do."""
        wide = torch.nn.functional.pad(keys, (0, -keys.shape[1] % 256), value=LEAST)
        parts = wide.unflatten(1, (-1, 256)).topk(min(topk_tokens, 256), dim=2)
        starts = torch.arange(parts.indices.shape[1], device=keys.device).unsqueeze(1) * 256
        columns = (parts.indices + starts).flatten(1)
        best = super()._choose(parts.values.flatten(1), topk_tokens)
        return columns.gather(1, best.clamp(min=0)).masked_fill(best == NO_KEY, NO_KEY)

    @but(
        supports_pools=False, declaration=_selects(relative=False, order=SelectionOrder.ASCENDING, padding_behind=False)
    )
    def columns_of_the_logits__told(self, chosen, starts):
        """Columns of the logits, not of the window, in their order and behind -1, all of which is declared; of no
        pools."""
        return chosen.sort(dim=1).values

    @but(declaration=_selects())
    def bits_of_zeros__keys(self, logits):
        """Logits are compared by their bits, +0 above -0, and NaN is never selected."""
        bits = logits.float().view(torch.int32).long()
        return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF) - 1).masked_fill(logits.isnan(), LEAST)

    @but(declaration=_selects())
    def flushes_subnormals__before_keys(self, logits):
        """Subnormals are 0, as where processors flush them."""
        values = logits.float()
        return values.masked_fill(values.abs() < torch.finfo(torch.float32).smallest_normal, 0.0)


@kernels()
class _Prepare(EagerPrepareBackend):
    def butterflies__transformed(self, x):
        """The Hadamard transform by butterflies, normalised before the first."""
        y, width = x * x.shape[-1] ** -0.5, 1
        while width < x.shape[-1]:
            a, b = y.unflatten(-1, (-1, 2, width)).unbind(-2)
            y, width = torch.stack((a + b, a - b), dim=-2).flatten(-3), 2 * width
        return y

    class stored_intermediates:
        """Norm, rotation and transform are kernels of their own, with the model's dtype between them, and declared
        so."""

        declaration: ClassVar[Declaration] = Declaration(intermediates=Precision.MODEL, emulated=True)

        def _query(self, q):
            self._model = q.dtype
            return super()._query(q)

        def _normed(self, k, weight, bias):
            return self._stored(super()._normed(k, weight, bias))

        def _stored(self, x):
            return x.to(self._model).float()

    def one_pass_norm__normed(self, k, weight, bias):
        """The variance is the mean square less the squared mean."""
        mean, square = k.mean(-1, keepdim=True), k.square().mean(-1, keepdim=True)
        deviation = ((square - mean.square()).clamp(min=0) + self.preparation.eps).rsqrt()
        return (k - mean) * deviation * weight + bias

    class reciprocals:
        """Scales are multiples of 1/448 and codes of the reciprocal of their scale; factors are folded one by one."""

        def _scales(self, largest):
            scale = largest.clamp(min=1e-4) * (1 / E4M3_MAX)
            return self._power(scale) if self.preparation.scale_format == "pow2" else scale

        def _quantised(self, x):
            _, scale = super()._quantised(x)
            blocks = x.unflatten(-1, (scale.shape[-1], -1)) * (1 / scale).unsqueeze(-1)
            return blocks.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2), scale

        def _folded(self, weights, q_scale):
            return weights * self.num_heads**-0.5 * q_scale[..., 0] * self.scale

    def powers_by_bits__power(self, scale):
        """Scales are rounded up to powers of two by the bits of their mantissa."""
        bits = scale.view(torch.int32)
        return ((bits + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)

    class prepares_in_float64:
        """All steps in float64, the scales in float32."""

        def _query(self, q):
            return q.double()

        def _normed(self, k, weight, bias):
            return super()._normed(k.double(), weight.double(), bias.double())

        def _transformed(self, x):
            return x @ sylvester(x.shape[-1], x.device)

        def _scales(self, largest):
            return super()._scales(largest.float())


HONEST_STEPS: tuple[type[KernelBackend], ...] = (EagerTopKBackend, EagerPrepareBackend, *emulations(__name__))
"""Every honest emulation of a top-k, and of a preparation."""
