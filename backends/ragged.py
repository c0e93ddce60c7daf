"""What the adapters of GPU libraries have in common: one ragged batch a call, one library behind it.

An adapter implements :meth:`RaggedPrefillBackend.attend`; whatever its library needs converted, it converts there.
"""

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from mla_conformance.backends.checks import check_operands, check_unquantised
from mla_conformance.backends.conversions import RaggedBatch
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.interface import MLAPrefillBackend
from mla_conformance.backends.metadata import MLACommonPrefillMetadata
from mla_conformance.backends.platform import DeviceCapability


class RaggedPrefillBackend(MLAPrefillBackend):
    """Operands are checked, trimmed to the rows that count, and handed to the library in one call.

    A call in which no query or no key counts is not launched: its output is 0 and its LSE -inf.

    Attributes:
        libraries: what must be installed.
        variant: name of this kernel among those of its family; empty for a family itself.
        variants: the kernels of a family by name, filled as they are defined.
    """

    libraries: ClassVar[tuple[Library, ...]] = ()
    variant: ClassVar[str] = ""
    variants: ClassVar[Mapping[str, type[MLAPrefillBackend]]] = MappingProxyType({})

    def __init_subclass__(cls, variant: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if variant:
            cls.variant = variant
            family = cls.__mro__[1]
            family.variants = MappingProxyType({**family.variants, variant: cls})  # type: ignore[attr-defined]

    @classmethod
    def preference(cls, device_capability: DeviceCapability | None) -> tuple[str, ...]:
        """Variants of a family in the order in which a device tries them."""
        return tuple(cls.variants)

    @classmethod
    def resolve(cls, device_capability: DeviceCapability | None) -> type[MLAPrefillBackend]:
        """The class that serves calls on a device: of a family the first variant that is installed and can run there.

        If none can, the first that the device could run, so that its reasons name what to install.
        """
        if cls.variant or not cls.variants:
            return cls
        candidates = [cls.variants[name] for name in cls.preference(device_capability)]
        able = [c for c in candidates if c.supports_compute_capability(device_capability)]
        return next((c for c in able if c.is_available()), (able or candidates)[0])

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        """What must be installed first."""
        return [reason for library in cls.libraries for reason in library.missing()]

    @classmethod
    def broken_dependencies(cls) -> list[str]:
        """What is installed but does not import; imports the libraries."""
        return [reason for library in cls.libraries for reason in library.broken()]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._served: dict[str, str] = {}

    def prepare_metadata(self, prefill_metadata: MLACommonPrefillMetadata) -> None:
        """Take the metadata of the next calls; plans of earlier ones are void."""
        super().prepare_metadata(prefill_metadata)
        self._plans: dict[int | None, Any] = {}

    def kernel_evidence(self) -> dict[str, str]:
        """Versions of the libraries, the variant, and what the last call was served by."""
        found = {library.distribution: library.version() for library in self.libraries}
        return found | ({"variant": self.variant} if self.variant else {}) | self._served

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See :class:`MLAPrefillBackend`."""
        check_unquantised(self, output_scale)
        output, lse = self._run(q, k, v, RaggedBatch.new_tokens(self._prefill_metadata), out)
        return (output, lse) if return_softmax_lse else output

    def run_prefill_context_chunk(
        self, chunk_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`MLAPrefillBackend`."""
        return self._run(q, k, v, RaggedBatch.context_chunk(self._prefill_metadata, chunk_idx), None)

    @abstractmethod
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the library.

        Args:
            q: [T, N, P + R], the rows that count, at least one.
            k: [S, N, P + R], at least one row.
            v: [S, N, V]; any strides.
            batch: lengths and mask.
            out: [T, N, V] to be written if the library can; whoever calls copies what was returned elsewhere.

        Returns:
            (output [T, N, V], lse [N, T] float32, natural logarithm).
        """

    def _run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_operands(self, q, k, v, batch.query_tokens, batch.key_tokens)
        rows, keys = batch.query_tokens, batch.key_tokens
        if not rows or not keys:
            return self._nothing(q, out)
        if q.shape[0] == rows:
            output, lse = self.attend(q, k[:keys], v[:keys], batch, out)
            return (output if out is None else _stored(output, out)), lse
        whole, whole_lse = self._nothing(q, out)
        output, lse = self.attend(q[:rows], k[:keys], v[:keys], batch, whole[:rows])
        _stored(output, whole[:rows])
        whole_lse[:, :rows] = lse
        return whole, whole_lse

    def _nothing(self, q: torch.Tensor, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of attention to no key."""
        output = q.new_empty(q.shape[0], self.num_heads, self.v_head_dim) if out is None else out
        lse = q.new_full((self.num_heads, q.shape[0]), -torch.inf, dtype=torch.float32)
        return output.zero_(), lse


def _stored(output: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out``, holding ``output``; copied unless the library wrote it there itself."""
    return out if output.data_ptr() == out.data_ptr() else out.copy_(output)
