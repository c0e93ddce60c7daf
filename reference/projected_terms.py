"""What projecting rounds, where the weights of ``kv_b_proj`` are dense: further terms of an error budget.

A faithful layer multiplies latents out to keys and values, or absorbs W_UK into the query and applies W_UV to what it
attended; either way each product is accumulated in float32 and rounded once to the model's dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ProjectedTerms:
    """Sums over the visible keys, [T, N, V] float64.

    A, E and E_l, Q, W and Y are terms of `ErrorTerms` (SPEC 4.2), with ~ those of an absorbed query and latents for
    keys; o_c = Σ p·c is what a row attended of the latents, before W_UV.

    rounding: the error of projections that are rounded to a unit roundoff, by the route where it is larger: keys and
        values, E + E_l·|o| + A, or the absorbed query and the attended latent, E~ + E_l~·|o| + Σ_l |o_c|·|W_UV|.
    variance: the same of independent roundings, Q + o² + W + Y or Y~ + Σ_l o_c²·W_UV².
    latent_rounding: that of latents rounded once, E~ + E_l~·|o| + magnitude.
    latent_variance: W~ + Y~ + latent_squares.
    magnitude: Σ p·Σ_l |c|·|W_UV|, the error of accumulating latents or of rounding parts of their sum.
    latent_squares: Σ_l W_UV²·(Σ p²·c² + o_c²), the variance of such roundings, independent or the same for all keys.
    accumulation: magnitude and what accumulating every product of a score does, Σ |q|·|W_UK|·|c|.
    """

    rounding: Tensor
    variance: Tensor
    latent_rounding: Tensor
    latent_variance: Tensor
    magnitude: Tensor
    latent_squares: Tensor
    accumulation: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "ProjectedTerms":
        """Each of them changed."""
        return ProjectedTerms(**{name: change(term) for name, term in vars(self).items()})
