"""The hazards of SPEC section 5, from which its list is written: ``mla-conformance capabilities --spec SPEC.md``.

What can be counted stands in braces and comes from the case lists, so that the text cannot contradict them:
``{decode.heads}`` are the values that the cases of ``decode`` have in ``heads``; ``spec_facts`` has the rest of them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hazard:
    """A circumstance in which kernels have been wrong in public.

    Attributes:
        clause: its number in section 5, which it keeps.
        id: its name in the catalogue of reported bugs.
        sentence: what generates it, or why it is out of reach; facts in braces.
    """

    clause: int
    id: str
    sentence: str


HAZARDS: dict[str, tuple[Hazard, ...]] = {
    "Oracles": (
        Hazard(
            1,
            "H01",
            "The LSE is judged by value, every row and head (4.2): `lse`, with as many heads as tokens in some "
            "calls, and every other case that asks for one.",
        ),
        Hazard(
            2,
            "H36",
            "The golden result takes its conventions from this text alone (1.1), never from a backend; e4m3 "
            "output and caches of codes are read with the consumer's formula (3.5, 6.4, 6.5).",
        ),
        Hazard(
            3,
            "H41",
            "The row rule of 4.2 divides by the row's own expected error; `tiny_values` and the contexts of "
            "`weights` and `token_counts` are where an absolute tolerance accepts zeros.",
        ),
        Hazard(
            4,
            "H30",
            "Every element is compared (4.2), and random pages, heads and columns differ; no cosine, norm or mean "
            "decides.",
        ),
        Hazard(
            5,
            "H13",
            "`determinism` repeats a call and compares the bits of output and LSE; a backend that declares "
            "otherwise does not support it.",
        ),
        Hazard(
            6,
            "H32",
            "`batch_invariance` judges each request alone, two neighbours without the others, and all in their "
            "batch, with equal bits where that is declared; `request_order` reverses the batch, swaps two inner "
            "requests and moves the first to the end. Batches are of {batch_invariance.requests} requests there; "
            "larger ones are in `token_counts` and `model_shapes`.",
        ),
        Hazard(
            7,
            "H29",
            "A process that dies is a failure of its case and the run goes on. A hang is a failure of its case, too.",
        ),
    ),
    "Lengths and the form of the batch": (
        Hazard(
            8,
            "H09",
            "`new_tokens` mixes lengths of {new_tokens.queries:least} to {new_tokens.queries:most}, with a long "
            "request before a tail of one token and after it; `context_chunk` mixes contexts of up to "
            "{context_chunk.contexts:most} tokens, shorter and longer than the queries.",
        ),
        Hazard(
            9,
            "H03",
            "`empty_rows`: requests without keys, without queries, first, in the middle, last, consecutive, and a "
            "batch without any key.",
        ),
        Hazard(
            10,
            "H02",
            "`chunked_context` and `split_invariance`: one chunk to more than ten, chunks that are empty for some "
            "requests, contexts that end at and next to a chunk's end; the plan covers every token once.",
        ),
        Hazard(
            11,
            "H10",
            "`new_tokens` and `context_chunk` run the tile sizes 16 to 256 and their neighbours, "
            "`chunked_context` those of its workspace, `decode` sequences of those lengths in one batch. How many "
            "splits a kernel makes is its own choice and not asked for.",
        ),
        Hazard(
            12,
            "H37",
            "Out of reach of the interfaces: their masks are causal or none, so no masked region lies before a "
            "visible key.",
        ),
        Hazard(
            13,
            "H16",
            "`decode_multi_token`: up to {decode_multi_token.queries:most} query tokens, as many for each request "
            "or not ([3,1,2]), sequences that end at and just past pages and splits; the needle shows a query "
            "that sees too much or too little. Short queries of a prefill against long contexts are in "
            "`context_chunk`.",
        ),
        Hazard(
            14,
            "H25",
            "`prefill_decode_agreement`: the same tokens as decodes and as prefills; `mixed_batch` has both in "
            "one batch (`decodes`) in either `order`, decodes of one token and of several.",
        ),
        Hazard(
            15,
            "H35",
            "`token_counts`: calls of up to {token_counts.tokens:most} new tokens, of up to "
            "{token_counts.keys:most} keys of context, and of up to {token_counts.requests:most} requests; "
            "`chunked_context`: up to {chunked_context.requests:most} requests in a workspace that they share.",
        ),
        Hazard(
            16,
            "H11",
            "`large_offsets` has {large_offsets.far} in `far`: rows of an operand, rows before the judged ones, "
            "or blocks of the cache beyond 2^31 or 2^32 elements. `many_rows` has calls of {many_rows.tokens} "
            "rows, on both sides of 2^16, in up to {many_rows.requests:most} requests. Both "
            "run{large_offsets.where}, as far as its memory goes.",
        ),
    ),
    "Values": (
        Hazard(
            17,
            "H07",
            "`large_logits`, `huge_logits` and `extreme_logits` scale by 8, 64 and 100; `negative` and `shifted` "
            "move every raw score by 1.6e5, `shift_invariance` judges them.",
        ),
        Hazard(
            18,
            "H08",
            "`ones`, `hot_ones` and `rising_ones` in `weights`; `hot_tail` over up to {hot_tail.contexts:most} "
            "keys; `rising` along the key axis.",
        ),
        Hazard(
            19,
            "H40",
            "`outliers` and `low_rank`.",
        ),
        Hazard(
            20,
            "H17",
            "`scale` is {usual.scale} times the usual one unless a case says otherwise; `softmax_scale` runs "
            "{softmax_scale.scale:least} to {softmax_scale.scale:most} times.",
        ),
        Hazard(
            21,
            "H18",
            "`oscale` runs from {quant_output_fp8.oscale:least} to {quant_output_fp8.oscale:most} in "
            "`quant_output_fp8`, `kscale` from {kv_cache_fp8.kscale:least} to {kv_cache_fp8.kscale:most} in "
            "`kv_cache_fp8`, also beside caches that no scale belongs to. Scales of q, k and v are out of reach: "
            "neither interface hands one over with a query, and `fp8_operands` means codes as they are.",
        ),
        Hazard(
            22,
            "H19",
            "`quant_output_fp8`: saturation, subnormal codes, NaN in padding rows. `kv_cache_fp8` and "
            "`kv_cache_fp8_ds_mla`: the same of a cache, NaN codes in what no request owns, tiles of zeros, "
            "latents a thousand times smaller than rope.",
        ),
        Hazard(
            23,
            "H31",
            "`attention_sinks`: drawn sinks and infinite ones of either sign, rows without keys beside them, over "
            "selected keys; the other interfaces have none.",
        ),
    ),
    "Memory": (
        Hazard(
            24,
            "H05",
            "Freed blocks of a result's size, the output tensor, the workspace and a merge's outputs are filled "
            "with `poison` before each call: NaN, infinity or large finite values.",
        ),
        Hazard(
            25,
            "H06",
            "Unused cache slots, page tails and the null block of every chunked case hold `poison`; "
            "`no_side_effects` runs {no_side_effects.poison}, `paged_cache` {paged_cache.poison} for kernels that "
            "read the pages themselves. The result is held to the golden one, not to the bits of a clean run. What a "
            "request itself holds, its queries in `neighbours` and its keys in `neighbour_keys`, is NaN, infinite or "
            "the largest number in turn, and changes no other request.",
        ),
        Hazard(
            26,
            "H24",
            "`out_tensor` and `quant_output_fp8` write between guard zones; the bytes of every operand and of the "
            "metadata are compared after every call of every capability.",
        ),
        Hazard(
            27,
            "H38",
            "`pad` puts poisoned rows behind the last counted token: `no_side_effects`, `quant_output_fp8`. Of a "
            "layer, `cache_write` and `graph_padding` have up to {cache_write.pad:most} and "
            "{graph_padding.pad:most} rows of padding with slot -1 and rows past the slots, poisoned otherwise "
            "than the cache, every byte of which is compared.",
        ),
        Hazard(
            28,
            "H04",
            "`strided_inputs` runs {strided_inputs.layout} in `layout`: halves of a projection, slices of wider "
            "buffers, transposed queries, rows that no vector load is aligned to; `v_padding` runs "
            "{v_padding.dims} in `dims`: V narrower, as wide and wider. `out` never aliases an input.",
        ),
        Hazard(
            29,
            "H27",
            "`paged_cache`: up to {paged_cache.layers:most} `layers` give blocks a stride beyond their size and "
            "the cache an offset, {paged_cache.spare:most} blocks in `spare` give ids beyond 2^15, "
            "{paged_cache.tails} in `tails` fill the block table past a request's pages. The blocks of every "
            "decode and every chunked case are shuffled.",
        ),
        Hazard(
            30,
            "H22",
            "In `page`, `paged_cache` runs {paged_cache.page} and `chunked_context` {chunked_context.page}, with "
            "lengths that are no multiple of it; the longest sequence of `paged_cache` has "
            "{paged_cache.sequences:most} tokens.",
        ),
    ),
    "State, order, concurrency": (
        Hazard(
            31,
            "H12",
            "`call_order`: A, the same shapes in another layout, B, A on one instance, batches of more requests, "
            "of fewer and of one, two instances prepared before either runs, of one softmax scale and of two, "
            "another `kscale`, and other contents at the same addresses; `no_side_effects`: results that must "
            "outlive later calls. Layers are in both.",
        ),
        Hazard(
            32,
            "H39",
            "`call_order` prepares metadata anew for each batch; `graph_replay` fills the buffers of one with "
            "others, smaller after larger.",
        ),
        Hazard(
            33,
            "H14",
            "`streams`,{streams.where}: inputs that are produced late on a side stream, then two instances on two "
            "streams, each with inputs produced late. Two instances side by side on one stream are in "
            "`call_order`, on every device.",
        ),
        Hazard(
            34,
            "H15",
            "`graph_padding`: up to {graph_padding.pad:most} rows of padding beside a batch. {captured}: batches "
            "that are captured with {graph_replay.requests} requests of a layer, {cuda_graph.requests} of a "
            "kernel, and replayed with others, smaller after larger ones, padded, with lengths drawn anew for "
            "each replay; one request more runs without the graph; addresses stay. On a GPU the calls of these "
            "capabilities are captured where that is declared (3.9), elsewhere they are made over the same buffers.",
        ),
        Hazard(
            35,
            "H33",
            "`loose_maxima` sets `inflate` to {loose_maxima.inflate}.",
        ),
    ),
    "Configuration": (
        Hazard(
            36,
            "H20",
            "`mla_dims` runs {mla_dims.dims} in `dims`, NoPE among them; `v_padding` has V wider than the "
            "query-key dim.",
        ),
        Hazard(
            37,
            "H21",
            "`head_counts`: {head_counts.heads}.",
        ),
        Hazard(
            38,
            "H26",
            "`dtypes` runs {dtypes.dtype}, `new_tokens` {new_tokens.dtype}, `context_chunk` "
            "{context_chunk.dtype}, `chunked_context` {chunked_context.dtype}, `decode` {decode.dtype}. "
            "`fp8_operands` has q, k and v of a prefill in {fp8_operands.dtype}.",
        ),
        Hazard(
            39,
            "H28",
            "`refusals`: what is declared supported runs and is right, what is not raises before it has written "
            "`out` or changed the process; `out`, `lse` and `quant` each change what is returned. Which branch a "
            "kernel took is reported where its library tells.",
        ),
        Hazard(
            40,
            "H34",
            "The keys of `chunked_context` are up-projected from latents, and the golden routes with explicit and "
            "absorbed weights agree (1.2). `weight_absorption` has other weights for every head, replaces them in "
            "place, and hands them over in codes.",
        ),
        Hazard(
            41,
            "H23",
            "`dcp`: {dcp.ranks} ranks in one process, dealt pieces of {dcp.interleave} tokens, ranks without a "
            "key, several query tokens under the bound of the whole sequence, {dcp.cache} in `cache`; each rank "
            "is judged, and all of them merged. `layer_dcp`: {layer_dcp.ranks} ranks of a layer, prefills with "
            "context in one chunk and in several, decodes, and the writes of each rank.",
        ),
    ),
}
"""By the headings of the section."""
