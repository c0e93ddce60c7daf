"""Decode kernels that are judged in a layer as well."""

from typing import ClassVar

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend


class LayeredDecode(EagerDecodeBackend):
    """EAGER's decode beside its prefill."""

    prefill_backend: ClassVar[type[EagerPrefillBackend]] = EagerPrefillBackend
