"""What projecting rounds: terms that bound a faithful layer by either route, and are exact where nothing rounds."""

from collections.abc import Callable

import pytest
import torch

from mla_conformance.reference.attention import AttentionState, attention
from mla_conformance.reference.error_budget import Roundoffs, element_budget, expected_row_rms
from mla_conformance.reference.projections import absorb_query, expand_key, up_project, up_project_output
from mla_conformance.reference.terms import ProjectedTerms, Projection, projected_terms

NOPE, ROPE, VALUE, LATENT, HEADS = 16, 8, 24, 64, 3
UNIT = 2.0**-8


class Layer:
    """Operands of one request of 4 queries and 30 keys, its weights dense or selecting."""

    def __init__(self, selecting: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.q, self.kv_c, self.k_pe = draw(4, HEADS, NOPE + ROPE), draw(30, LATENT), draw(30, ROPE)
        self.weight = draw(LATENT, HEADS, NOPE + VALUE) / LATENT**0.5
        if selecting:
            self.weight = torch.eye(LATENT, NOPE + VALUE, dtype=torch.float64).unsqueeze(1).expand(-1, HEADS, -1)
        self.k_nope, self.v = up_project(self.kv_c, self.weight).tensor_split([NOPE], dim=-1)
        self.k = expand_key(self.k_nope, self.k_pe)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.state(q, k, v).output

    def state(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionState:
        starts = {"query_start_loc": (0, 4), "key_start_loc": (0, 30)}
        return attention(q, k, v, **starts, scale=0.3, causal=True, with_terms=True, with_key_terms=True)

    def terms(self) -> ProjectedTerms:
        projection = Projection(self.kv_c, self.weight)
        return projected_terms(
            self.q, self.k, self.v, projection, query_start_loc=(0, 4), key_start_loc=(0, 30), scale=0.3
        )

    def golden(self) -> AttentionState:
        state = self.state(self.q, self.k, self.v)
        return AttentionState(state.output, state.lse, state.terms, self.terms())


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


def multiplied_out(layer: Layer) -> torch.Tensor:
    return layer.attend(layer.q, expand_key(rounded(layer.k_nope), layer.k_pe), rounded(layer.v))


def absorbed(layer: Layer) -> torch.Tensor:
    q_nope, q_pe = layer.q.tensor_split([NOPE], dim=-1)
    ql = rounded(absorb_query(q_nope, layer.weight[..., :NOPE]))
    keys = torch.cat([layer.kv_c, layer.k_pe], dim=-1).unsqueeze(1)
    attended = layer.attend(torch.cat([ql, q_pe], dim=-1), keys, layer.kv_c.unsqueeze(1))
    return up_project_output(rounded(attended), layer.weight[..., NOPE:])


def of_rounded_latents(layer: Layer) -> torch.Tensor:
    k_nope, v = up_project(rounded(layer.kv_c), layer.weight).tensor_split([NOPE], dim=-1)
    return layer.attend(layer.q, expand_key(k_nope, rounded(layer.k_pe)), v)


NONE = {"p": 0.0, "p_floor": 0.0, "partials": 0.0, "output": 0.0, "output_floor": 0.0, "row_sum": 0.0, "exp": 0.0}


@pytest.mark.parametrize(
    ("route", "roundoffs"),
    [(multiplied_out, {"projections": UNIT}), (absorbed, {"projections": UNIT}), (of_rounded_latents, {"keys": UNIT})],
)
def test_a_faithful_route_stays_within_the_budget_and_has_its_size(
    route: Callable[[Layer], torch.Tensor], roundoffs: dict[str, float]
) -> None:
    layer = Layer()
    golden, allowed = layer.golden(), Roundoffs(**NONE, accumulation=0.0, **roundoffs)
    error = (route(layer) - golden.output).abs()
    assert bool((error <= element_budget(golden, allowed)).all())
    ratio = error.square().mean(-1).sqrt() / expected_row_rms(golden, allowed)
    assert 0.2 < float(ratio.mean()) < 1.2


def test_weights_that_select_leave_the_terms_of_the_kernels() -> None:
    layer = Layer(selecting=True)
    terms, state = layer.terms(), layer.golden()
    assert state.terms is not None
    assert torch.allclose(terms.magnitude, state.terms.magnitude)
    moved = state.terms.score + state.terms.lse_score.mT.unsqueeze(-1) * state.output.abs()
    assert torch.allclose(terms.latent_rounding, moved + terms.magnitude, rtol=1e-9)
    assert torch.allclose(terms.rounding, moved + terms.magnitude, rtol=1e-9)
    projection, starts = Projection(layer.kv_c[:2], layer.weight), {"query_start_loc": (0, 4), "key_start_loc": (0, 2)}
    few = projected_terms(layer.q, layer.k[:2], layer.v[:2], projection, **starts, scale=0.3)
    assert all(not part[:2].any() and part[2:].any() for part in vars(few).values())  # rows without keys have none
