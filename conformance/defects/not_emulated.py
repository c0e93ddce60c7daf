"""Reported bugs of the same layers that have no emulation here, each with the reason."""

NOT_EMULATED: dict[str, str] = {
    "trtllm-ragged-tma-batch-stride-int32-wrap": "needs more than 2^31 elements of K; a smaller number is another bug",
    "merge-uint32-offset-overflow": "needs more than 2^32 output elements (8.6 GB); a smaller number is another bug",
    "fp8-dim-product-int32": "needs more than 2^31 elements in one operand; a smaller number is another bug",
    "causal-topleft-instead-of-bottomright": "new tokens have as many keys as queries, where both alignments coincide; "
    "visible in decode with several query tokens",
    "causal-main-tiles-beyond-kv": "needs more queries than keys under a causal mask, which no prefill call has",
    "fp8-output-ulp-boundary-division-vs-reciprocal": "no defect: both codes lie within the interval of SPEC 3.5; "
    "an honest variant multiplies by the reciprocal",
    "sparse-prefill-lanes-beyond-topk-length": "sparse attention has no place in the interface",
    "aiter-no-kernel-bf16q-fp8kv-qlen5": "needs the decode interface and an FP8 cache",
    "nvfp4-swizzled-output-scale-not-splittable-mixed-batch": "needs decode rows in the batch and block-scaled output",
}
