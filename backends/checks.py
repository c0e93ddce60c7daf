"""What a backend of ours checks before it launches: the refusals of SPEC 3.8, with expected and got, by one path."""

from mla_conformance.backends.cache_dtypes import check_cache
from mla_conformance.backends.decode import check_decode_operands
from mla_conformance.backends.interface import check_operands, check_unquantised

__all__ = ["check_cache", "check_decode_operands", "check_operands", "check_unquantised"]
