"""Cases of the nightly tier with contexts that no full matrix of scores fits beside. No torch."""

from mla_conformance.cases.case import Call, Case

_MILLION = 2**20

LONG_CONTEXTS = (
    Case(capability=Call.NEW_TOKENS, heads=16, q=(32768,), data="needle"),
    Case(capability=Call.NEW_TOKENS, heads=128, q=(8192,), data="needle"),
    Case(capability=Call.NEW_TOKENS, heads=16, q=(98304, 1, 32768), data="hot_tail"),
    Case(capability=Call.CONTEXT_CHUNK, heads=128, q=(256,), kv=(131072,), data="needle"),
    Case(capability=Call.CONTEXT_CHUNK, heads=16, q=(512,), kv=(_MILLION,), data="needle"),
    Case(capability=Call.CHUNKED_CONTEXT, heads=16, q=(512,), kv=(_MILLION,), page=64, workspace=65536, data="needle"),
    Case(capability=Call.CHUNKED_CONTEXT, heads=16, q=(512, 3), kv=(_MILLION - 1, 100), page=64, workspace=65536),
)
