"""Reported bugs of the same layers that have no emulation here, each with the reason."""

NOT_EMULATED: dict[str, str] = {
    "trtllm-ragged-tma-batch-stride-int32-wrap": "needs more than 2^31 elements of K; a smaller number is another bug",
    "merge-uint32-offset-overflow": "needs more than 2^32 output elements (8.6 GB); a smaller number is another bug",
    "fp8-dim-product-int32": "needs more than 2^31 elements in one operand; a smaller number is another bug",
    "causal-main-tiles-beyond-kv": "needs more queries than keys under a causal mask, which no prefill call has",
    "fp8-output-ulp-boundary-division-vs-reciprocal": "no defect: both codes lie within the interval of SPEC 3.5; "
    "an honest variant multiplies by the reciprocal",
    "nvfp4-swizzled-output-scale-not-splittable-mixed-batch": "needs decode rows in the batch and block-scaled output",
    "mla-page-index-int32-overflow": "needs a cache of more than 2^31 elements; `large_offsets` has one on a GPU",
    "trtllm-insufficient-semaphores-deadlock": "a hang, which ends a run of defects; the watchdog's tests have one",
    "aiter-fp8-none-scale-assert": "the interface hands over a scale with every call",
    "weight-block-scale-transposed-view": "block-quantised weights are dequantised outside of the interface",
    "mlapo-rope-weight-permute-wrong-axis": "RoPE and the projections of hidden states precede every backend",
    "fp16-mla-overflow": "no defect of a kernel: in fp16 an absorbed query overflows before it is handed over",
    "workspace-locked-lazy-alloc": "the lock is the engine's, and no call of the interface sets it",
    "attn-sink-not-sliced-by-tp-rank": "the engine slices the sinks; a backend is handed those of its heads",
    "keyless-row-sink-underflow-lse": "the LSE that a sink is part of; by this contract it leaves the sink out",
    "eagle-kv-indices-underallocated": "tree drafting has no place in the interface",
    "rotary-dim-not-plumbed-oob": "RoPE precedes every backend",
    "ragged-plan-strided-indptr": "metadata tensors are packed by contract, as every engine builds them",
    "aiter-partial-buffer-sized-wrong": "callers of that library size its private buffers; this interface has none",
    "dcp-topk-tie-nondeterministic-partition": "who selects breaks ties; a backend is handed the lists",
    "o-aliased-as-partial-logits-buffer": "a decode returns an output of its own, so there is none to write beyond",
    "nan-kv-in-shared-prefix-block-crosses-requests": "a request whose own keys are NaN has no golden result; that "
    "other slots' NaN stays out of a result is asked by poisoning them, as in mla-last-page-nan-leak",
    "max-context-chunk-not-aligned-to-cp-virtual-block": "chunks are cut by whole sequences, whatever a rank holds of "
    "them, so that none has to be aligned to a turn of the ranks",
    "dcp-local-chunk-len-ignores-chunking": "a rank's lengths are counted chunk by chunk, and those of a "
    "whole context are not at hand where it gathers",
    "even-split-workspace-assert-zero-chunk": "no defect by the contract: the plan is that even split, and a workspace "
    "below a page for each context must be refused",
    "decode-output-depends-on-host-max-seq-len": "no defect by the contract: another maximum may round otherwise, and "
    "each result is held to its budget",
    "sparse-topk-depends-on-the-batch": "who selects breaks ties (vllm#53257); a backend is handed the lists",
    "sparse-padded-graph-rows-hang": "a hang (flashinfer#5015), which ends a run of defects",
    "sparse-indexer-event-in-a-broken-capture": "the engine captures its indexer in pieces (vllm#56785)",
}
