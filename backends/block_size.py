"""Page sizes that a kernel accepts (vLLM's ``MultipleOf``)."""

from collections.abc import Sequence


class MultipleOf:
    """Every page size that is a multiple of ``base`` tokens."""

    base: int

    def __init__(self, base: int) -> None:
        self.base = base

    def __repr__(self) -> str:
        return f"MultipleOf({self.base})"


def accepts_block_size(supported: Sequence[int | MultipleOf], block_size: int) -> bool:
    """Whether a kernel reads pages of ``block_size`` tokens; an empty list accepts every size."""
    return not supported or any(
        block_size % size.base == 0 if isinstance(size, MultipleOf) else block_size == size for size in supported
    )
