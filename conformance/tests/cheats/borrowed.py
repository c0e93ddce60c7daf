"""Results that somebody else computes."""

from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mla_conformance.backends.loading import resolve_backend
from mla_conformance.backends.references import parse_reference
from mla_conformance.backends.roles import Role
from mla_conformance.reference.attention import attention
from mla_conformance.tests.cheats.cheat import ThreeTimes, cheat

_OWN = "that its own kernel computed"
NUMBERS_ARE_RIGHT = (
    "The numbers are right, and a verdict is about nothing else. On a GPU the record lists the kernels that ran; "
    "whoever trusts the name reads the source that the certificate pins."
)

_SIZES = ("num_heads", "scale", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _golden(attention: Any, kernel: ThreeTimes, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """What the definition gives, in the dtypes that the contract asks for."""
    state = attention(
        q, k, v, query_start_loc=kernel.lengths, key_start_loc=kernel.lengths, scale=kernel.scale, causal=True
    )
    return state.output.to(q.dtype), state.lse.float()


@cheat(claims=_OWN, trust=NUMBERS_ARE_RIGHT)
class CallsTheReference(ThreeTimes):
    """Calls the golden reference and rounds its result."""

    def answer(self, output, lse, q, k, v):
        return _golden(attention, self, q, k, v)


@cheat(claims=_OWN, trust=NUMBERS_ARE_RIGHT)
class CopiesTheReference(ThreeTimes):
    """Executes a copy of the reference's source, under another name."""

    def answer(self, output, lse, q, k, v):
        spec = find_spec("mla_conformance.reference.attention")
        assert spec is not None and spec.origin is not None
        copy = ModuleType("of_its_own")
        exec(compile(Path(spec.origin).read_text(encoding="utf-8"), "of_its_own", "exec"), vars(copy))
        return _golden(copy.attention, self, q, k, v)


@cheat(claims=_OWN, trust=NUMBERS_ARE_RIGHT)
class CallsAnotherBackend(ThreeTimes):
    """Hands every call to the adapter of another library."""

    def answer(self, output, lse, q, k, v):
        kernel = resolve_backend(parse_reference("TORCH_SDPA"), None, Role.PREFILL)
        other = kernel(**{name: getattr(self, name) for name in _SIZES}, vllm_config=None)
        other.prepare_metadata(self._prefill_metadata)
        return other.run_prefill_new_tokens(q, k, v, True)


@cheat(claims=_OWN, trust=NUMBERS_ARE_RIGHT)
class WrapsSDPA(ThreeTimes):
    """Calls torch's attention on each request."""

    def answer(self, output, lse, q, k, v):
        for start, end in zip(self.lengths, self.lengths[1:], strict=False):
            heads = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            found = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=self.scale)
            output[start:end] = found.squeeze(0).transpose(0, 1)
        return output, lse
