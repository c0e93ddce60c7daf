"""Page sizes that a kernel accepts (vLLM's ``MultipleOf``)."""

from dataclasses import dataclass


@dataclass(frozen=True, repr=False)
class MultipleOf:
    """Every page size that is a multiple of ``base`` tokens."""

    base: int

    def __repr__(self) -> str:
        return f"MultipleOf({self.base})"
