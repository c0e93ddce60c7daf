"""EAGER's kernels, said to be capturable: on a device without graphs a replay is a call over the same buffers."""

from typing import ClassVar

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.graph_support import AttentionCGSupport


class CapturablePrefill(EagerPrefillBackend):
    """Prefills over a graph's buffers."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS


class CapturableDecode(EagerDecodeBackend):
    """Decodes over a graph's buffers."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS


class CapturableSparse(EagerSparseBackend):
    """Attention to selected keys over a graph's buffers."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
