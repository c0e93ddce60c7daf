"""Page sizes that a kernel accepts (vLLM's ``MultipleOf``)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.backends.kernel import KernelBackend


@dataclass(frozen=True, repr=False)
class MultipleOf:
    """Every page size that is a multiple of ``base`` tokens."""

    base: int

    def __repr__(self) -> str:
        return f"MultipleOf({self.base})"


class PagedKernel(KernelBackend):
    """A kernel over a paged cache."""

    supported_block_sizes: ClassVar[list[int | MultipleOf]] = [MultipleOf(1)]  # page sizes of the cache, in tokens

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        """Page sizes of the cache, in tokens, by vLLM's name."""
        return cls.supported_block_sizes


def accepts_block_size(supported: Sequence[int | MultipleOf], block_size: int) -> bool:
    """Whether a kernel reads pages of ``block_size`` tokens; an empty list accepts every size."""
    return not supported or any(
        block_size % size.base == 0 if isinstance(size, MultipleOf) else block_size == size for size in supported
    )
