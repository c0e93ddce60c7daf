"""The calls of a compressor over the tokens of a batch, one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mla_conformance.backends.compress import CompressMetadata, MLACompressBackend
from mla_conformance.problems.memory import Guarded
from mla_conformance.roles.cache.call import CacheCall


@dataclass(frozen=True)
class CompressStep:
    """One of them.

    Attributes:
        kv: [T, C · D] key states.
        score: [T, C · D] gate scores.
        metadata: of its batch.
    """

    kv: torch.Tensor
    score: torch.Tensor
    metadata: CompressMetadata

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them by name."""
        yield from (("kv", self.kv), ("score", self.score))
        yield from vars(self.metadata).items()


@dataclass(frozen=True, kw_only=True)
class CompressCall(CacheCall):
    """``run_compress`` for each step; what all of them read is in ``operands``.

    Attributes:
        steps: in order.
    """

    steps: tuple[CompressStep, ...]

    def owned(self) -> dict[str, torch.Tensor]:
        """What is read in any step; what is written is compared with what it must be."""
        numbered = enumerate(self.steps)
        named = {f"{name} of call {number}": x for number, step in numbered for name, x in step.tensors()}
        return super().owned() | named

    def invoke(self, backend: MLACompressBackend, out: Guarded | None) -> None:
        """Every call, on memory as the one before has left it."""
        for image in self.written.values():
            image.reset()
        caches = {name: image.cache for name, image in self.written.items()}
        for step in self.steps:
            backend.prepare_metadata(step.metadata)
            backend.run_compress(step.kv, step.score, **self.operands, **caches)
