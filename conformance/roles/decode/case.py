"""Cases of a decode backend: absorbed queries against the latents of a paged cache, on one rank or on several."""

from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Call, Sizes


@dataclass(frozen=True, kw_only=True)
class DecodeCase(CachedCase):
    """A question to a decode backend."""

    role: ClassVar[Role] = Role.DECODE
    calls: ClassVar[tuple[Call, ...]] = (Call.DECODE,)

    @property
    def sizes(self) -> Sizes:
        """By the head dims before absorption: results outweigh queries and keys, which heads share."""
        each = self.heads * (self.dimensions.qk_head_dim + self.dimensions.v_head_dim)
        # The latent is both key and value.
        columns = 2 * self.kv_lora_rank + self.dimensions.qk_rope_head_dim
        return super().sizes._replace(columns=columns, row=each, key=each)
