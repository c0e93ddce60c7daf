"""The comparison rules of other projects' tests, as data: what they would say of the same outputs.

Read from their public test suites; a rule sees an output [T, N, V] and an LSE [N, T], or None where that project does
not compare the LSE, beside the golden ones. Only the rule is taken over: not their data, not their references.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mla_conformance.problems.operands import segments
from mla_conformance.problems.problem import Problem

Rule = Callable[[torch.Tensor, torch.Tensor], bool]


@dataclass(frozen=True)
class Policy:
    """A project's rule.

    Attributes:
        name: the project.
        output: whether it accepts an output beside the golden one.
        lse: whether it accepts an LSE; None if it never looks.
        source: the test that holds it.
    """

    name: str
    output: Rule
    lse: Rule | None
    source: str

    def accepts(self, output: torch.Tensor, lse: torch.Tensor | None, golden: "Golden") -> bool:
        """Whether the project's test would pass."""
        if not self.output(output.double(), golden.output):
            return False
        return self.lse is None or lse is None or self.lse(lse.double(), golden.lse)


@dataclass(frozen=True)
class Golden:
    """Golden output [T, N, V] and LSE [N, T]."""

    output: torch.Tensor
    lse: torch.Tensor


def close(rtol: float, atol: float) -> Rule:
    """``allclose``; equal infinities are close, NaN never is."""
    return lambda got, want: torch.allclose(got, want, rtol=rtol, atol=atol)


def _relative(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (got - want).abs() / want.abs().clamp(min=1e-30)


def either(atol: float, rtol: float) -> Rule:
    """Every element close absolutely or relatively."""

    def rule(got: torch.Tensor, want: torch.Tensor) -> bool:
        same = got == want
        return bool((same | ((got - want).abs() < atol) | (_relative(got, want) < rtol)).all())

    return rule


def _flash_mla_output(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Each element as in :func:`either`, and a cosine distance of at most 5e-6."""
    norms = got.square().sum() + want.square().sum()
    distance = 1 - 2 * (got * want).sum() / norms if norms > 0 else torch.tensor(0.0)
    return either(8e-4, 2.01 / 128)(got, want) and bool(distance.abs() <= 5e-6)


def _tokenspeed_output(got: torch.Tensor, want: torch.Tensor) -> bool:
    """1e-2 on each element, and a relative RMSE of at most 0.01."""
    error, size = (got - want).square().mean().sqrt(), want.square().mean().sqrt()
    return close(1e-2, 1e-2)(got, want) and bool(error <= 0.01 * size + 1e-12)


def twice_low_precision(problem: Problem) -> Policy:
    """flash-attention: at most twice the error of the same mathematics in the model's dtype, plus a rounding."""

    def rule(got: torch.Tensor, want: torch.Tensor) -> bool:
        plain = torch.cat([_low_precision(problem, index) for index in range(len(problem.case.q))])
        slack = 2 * ((want.to(problem.dtype) + 0.3 - 0.3).double() - want).abs().max()
        return bool((got - want).abs().max() <= 2 * (plain.double() - want).abs().max() + slack)

    return Policy("flash-attention 2×", rule, None, "flash-attention tests/test_flash_attn.py")


def _low_precision(problem: Problem, request: int) -> torch.Tensor:
    """One request's output computed plainly in the model's dtype."""
    call = problem.calls[0]
    rows = list(segments(problem.query_start_loc))[request]
    keys = list(segments(call.key_start_loc))[request]
    q, k, v = call.q[rows].transpose(0, 1), call.k[keys].transpose(0, 1), call.v[keys].transpose(0, 1)
    scores = (q @ k.mT * problem.case.softmax_scale).float()
    if problem.case.is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1).to(problem.dtype) @ v).transpose(0, 1)


POLICIES: tuple[Policy, ...] = (
    Policy("vLLM 1e-2", close(1e-2, 1e-2), None, "vllm tests/v1/attention"),
    Policy("SGLang 3e-2", close(3e-2, 3e-2), None, "sglang test/kits/attention_unittest"),
    Policy("TensorRT-LLM", close(3e-3, 3e-2), None, "TensorRT-LLM tests/unittest/_torch/attention"),
    Policy("FlashInfer 1e-3", close(1e-3, 1e-3), close(1e-3, 1e-3), "flashinfer tests/attention/test_deepseek_mla.py"),
    Policy(
        "FlashMLA", _flash_mla_output, either(1e-6, 8.01 / 65536), "FlashMLA tests/test_flash_mla_dense_decoding.py"
    ),
    Policy("tokenspeed", _tokenspeed_output, close(1e-2, 1e-2), "tokenspeed-mla tests/test_mla_decode.py"),
    Policy("flashinfer-bench", either(1e-2, 1e-2), either(1e-2, 1e-2), "flashinfer-bench evaluators"),
)
"""Rules that need nothing but the two results; :func:`twice_low_precision` needs the problem."""
