"""The layer that wrong and honest layers are made from: the common one over EAGER's kernels."""

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.layer.mla_layer import MLACommonBackend


class EagerLayer(MLACommonBackend):
    """Prefill and decode as EAGER computes them; a subclass replaces a step of the layer around them."""

    prefill_backend = EagerPrefillBackend
    decode_backend = EagerDecodeBackend
    supported_dtypes = EagerDecodeBackend.supported_dtypes
    supported_kv_cache_dtypes = EagerDecodeBackend.supported_kv_cache_dtypes
