"""Small cases that show defects which need two ordinary facts together, and the facts without which they do not."""

from typing import NamedTuple


class Edge(NamedTuple):
    """Where a defect shows.

    Attributes:
        case: id of a case that it fails, behind the capability.
        apart: fields that replace those of the case; with either of them alone the defect passes.
    """

    case: str
    apart: tuple[str, str]


_DECODE = "call=decode;dims=small;"
_MIXED = "call=decode;cache=fp8_ds_mla;"
_SPARSE = "call=sparse_decode;dims=small;"
_LATENTS = "call=sparse_decode;heads=2;"
_LOGITS = "call=index_logits;heads=4;"
_TOPK = "call=index_topk;heads=4;"
_LAYER = "call=layer;dims=32-16-32-64;"

CASES_THAT_SHOW = {
    "decode-tile-of-32-without-keys-raises-maximum": Edge(
        _DECODE + "q=[2];kv=[31];data=negative", ("kv=[30]", "data=normal")
    ),
    "decode-tile-of-64-without-keys-raises-maximum": Edge(
        _DECODE + "q=[2];kv=[63];data=negative", ("kv=[31]", "data=normal")
    ),
    "decode-tile-of-128-without-keys-raises-maximum": Edge(
        _DECODE + "q=[2];kv=[127];data=negative", ("q=[1]", "data=shifted")
    ),
    "prefill-tile-of-64-without-keys-raises-maximum": Edge(
        "dims=small;q=[65];data=negative", ("q=[64]", "data=normal")
    ),
    "prefill-tile-of-128-without-keys-raises-maximum": Edge(
        "dims=small;q=[129];data=negative", ("q=[128]", "data=normal")
    ),
    "sparse-tile-of-32-without-keys-raises-maximum": Edge(
        _SPARSE + "q=[1];kv=[20];topk=64;data=negative", ("kv=[40]", "data=normal")
    ),
    "sparse-tile-of-64-without-keys-raises-maximum": Edge(
        _SPARSE + "q=[1];kv=[20];topk=128;data=negative", ("topk=64", "data=normal")
    ),
    "sparse-tile-of-128-without-keys-raises-maximum": Edge(
        _SPARSE + "q=[1];kv=[20];topk=192;data=negative", ("topk=128", "data=normal")
    ),
    "layer-tile-without-keys-raises-maximum": Edge(
        _LAYER + "q=[65];kv=[0];data=extreme_logits", ("q=[64]", "data=normal")
    ),
    "decode-split-without-keys-weighs-as-a-logit-of-0": Edge(_DECODE + "q=[2];kv=[63]", ("q=[1]", "kv=[62]")),
    "decode-split-without-keys-repeats-the-one-before": Edge(_DECODE + "q=[2];kv=[127]", ("q=[1]", "kv=[126]")),
    "sparse-tile-without-keys-weighs-as-a-logit-of-0": Edge(
        _SPARSE + "q=[1];kv=[20];topk=128", ("topk=64", "kv=[200]")
    ),
    "decode-last-tile-of-packed-rows-lost": Edge(_DECODE + "heads=24;q=[3];kv=[40]", ("heads=32;q=[4]", "q=[1]")),
    "decode-last-head-tile-bound-by-first-token": Edge(_DECODE + "heads=24;q=[2];kv=[40]", ("heads=32", "q=[1]")),
    "decode-lse-rows-advance-by-a-power-of-two": Edge(
        _DECODE + "heads=24;q=[1,1];kv=[40,9]", ("heads=32", "q=[1];kv=[40]")
    ),
    "decode-lse-index-in-two-bytes": Edge(
        "call=decode;dims=4-4-4-4;heads=112;q=[16x40];kv=[3x40]", ("heads=8", "q=[16];kv=[3]")
    ),
    "decode-workspace-of-64-partials": Edge(_DECODE + "q=[1x9];kv=[600x9]", ("q=[1,1];kv=[600,600]", "kv=[60x9]")),
    "decode-longest-of-many-loses-a-tile": Edge(_DECODE + "q=[1x9];kv=[9x8,1100]", ("q=[1,1];kv=[9,1100]", "kv=[9x9]")),
    "decode-empty-context-of-several-tokens-is-padding": Edge(_DECODE + "q=[2,2];kv=[0,9]", ("q=[1,1]", "kv=[1,9]")),
    "decode-padded-batch-has-as-many-tokens-each": Edge(_DECODE + "q=[1,3];kv=[7,9];pad=1", ("q=[3,3]", "pad=0")),
    "decode-bound-by-declared-longest-query": Edge(_DECODE + "q=[3];kv=[9];inflate=2", ("q=[1]", "inflate=1")),
    "decode-half-sum-of-scaled-weights-overflows": Edge(
        _DECODE + "dtype=fp16;q=[1];kv=[300];data=zero_keys", ("dtype=bf16", "data=normal")
    ),
    "decode-codes-unscaled-with-several-tokens": Edge(_DECODE + "cache=fp8;q=[2];kv=[9]", ("cache=auto", "q=[1]")),
    "decode-codes-bound-by-token-in-three-bits": Edge(_DECODE + "cache=fp8;q=[9];kv=[9]", ("cache=auto", "q=[8]")),
    "decode-rope-of-codes-in-single-pages-unscaled": Edge(
        _DECODE + "cache=fp8;q=[1];kv=[9];page=1", ("cache=auto", "page=16")
    ),
    "decode-mixed-entry-offset-in-two-bytes": Edge(
        _MIXED + "q=[1];kv=[150];page=256;data=needle", ("cache=auto", "page=64")
    ),
    "decode-single-head-takes-first-scale-of-mixed-entries": Edge(
        _MIXED + "heads=1;q=[1];kv=[9]", ("heads=2", "cache=auto")
    ),
    "decode-single-pages-assumed-packed": Edge(_DECODE + "q=[1];kv=[9];page=1;layers=2", ("page=16", "layers=1")),
    "decode-slot-in-fifteen-bits": Edge(
        _DECODE + "q=[1];kv=[600];page=64;spare=900;data=needle", ("page=16", "spare=3")
    ),
    "decode-table-rows-as-wide-as-the-first": Edge(_DECODE + "q=[1,1];kv=[9,70]", ("kv=[70,9]", "q=[1];kv=[9]")),
    "decode-full-last-page-fetches-the-next": Edge(
        _DECODE + "q=[1,1];kv=[15,40];tails=huge", ("kv=[14,40]", "tails=stale")
    ),
    "dcp-several-tokens-assume-interleave-of-one": Edge(
        _DECODE + "q=[3];kv=[29];ranks=2;interleave=4", ("q=[1]", "interleave=1")
    ),
    "dcp-rank-in-three-bits": Edge(_DECODE + "q=[9];kv=[40];ranks=16", ("q=[1]", "ranks=8")),
    "quant-output-odd-head-unscaled": Edge("dims=small;heads=3;q=[9];quant=fp8", ("heads=4", "quant=none")),
    "quant-output-unsaturated-behind-a-power-of-two-of-heads": Edge(
        "dims=small;heads=3;q=[9];quant=fp8;oscale=1000", ("heads=1", "oscale=130000")
    ),
    "quant-output-lse-of-scaled-values": Edge("dims=small;q=[9];quant=fp8", ("lse=0", "quant=none")),
    "merge-of-nothing-halves-the-odd-head": Edge(
        "call=chunked_context;dims=small;heads=3;q=[5,9];kv=[0,20];merge=own", ("heads=4", "kv=[5,20]")
    ),
    "merge-last-tile-of-rows-and-heads-keeps-the-suffix": Edge(
        "call=chunked_context;dims=small;heads=4;q=[17];kv=[20];merge=own", ("q=[16]", "merge=golden")
    ),
    "fp8-operands-tail-of-heads-is-one-head": Edge("dims=small;dtype=e4m3;heads=24;q=[9]", ("dtype=bf16", "heads=16")),
    "prefill-empty-context-advances-odd-strides": Edge(
        "call=context_chunk;dims=small;q=[3,4];kv=[0,9];layout=odd", ("kv=[1,9]", "layout=kv_b_proj")
    ),
    "prefill-lone-row-of-a-later-request-repeats-the-one-before": Edge("dims=small;q=[5,65]", ("q=[65]", "q=[5,64]")),
    "prefill-request-behind-an-empty-one-lost-after-32": Edge("dims=small;q=[2x33,0,3]", ("q=[2,0,3]", "q=[2x33,1,3]")),
    "prefill-raw-scores-in-half": Edge("dims=small;dtype=fp16;q=[9];data=shifted", ("dtype=bf16", "data=normal")),
    "prefill-context-shorter-than-queries-masked": Edge(
        "call=context_chunk;dims=small;q=[20];kv=[9]", ("q=[9]", "kv=[20]")
    ),
    "prefill-float32-assumes-packed-keys": Edge(
        "dims=small;dtype=fp32;q=[9];layout=sliced", ("dtype=bf16", "layout=packed")
    ),
    "context-chunk-behind-16-is-of-the-first-request": Edge(
        "call=chunked_context;dims=small;q=[2,3];kv=[300,300];workspace=32", ("q=[2];kv=[300]", "workspace=256")
    ),
    "sparse-whole-tiles-of-a-list-read-one-more": Edge(
        _SPARSE + "q=[1];kv=[63];topk=128;length=1;behind=stale", ("kv=[50]", "behind=minus")
    ),
    "sparse-second-list-cut-to-the-first": Edge(
        _LATENTS + "q=[1];kv=[600];topk=32;extra=auto;extra_topk=64", ("extra=none", "topk=64")
    ),
    "sparse-empty-second-list-is-whole": Edge(
        _LATENTS + "q=[1x6];kv=[40x6];fill=ragged;length=1;behind=stale;extra=auto", ("extra=none", "behind=minus")
    ),
    "sparse-second-codes-unscaled-beside-a-plain-cache": Edge(
        _LATENTS + "q=[1];kv=[40];extra=fp8", ("cache=fp8", "extra=auto")
    ),
    "sparse-lse-of-two-caches-with-the-sink": Edge(
        _LATENTS + "q=[1];kv=[40];extra=auto;sink=drawn", ("extra=none", "sink=none")
    ),
    "sparse-empty-row-beside-a-sink-of-minus-inf": Edge(
        _SPARSE + "heads=8;q=[1x8];kv=[40x8];fill=ragged;sink=extreme", ("fill=full", "sink=drawn")
    ),
    "sparse-empty-rows-behind-64-not-written": Edge(
        _SPARSE + "q=[1x99];kv=[9x99];fill=ragged;topk=16", ("q=[1x60];kv=[9x60]", "fill=full")
    ),
    "sparse-last-tile-of-packed-rows-lost": Edge(_SPARSE + "heads=24;q=[3];kv=[40]", ("heads=32;q=[4]", "q=[1]")),
    "sparse-second-head-group-loses-a-partial-tile": Edge(
        _SPARSE + "heads=80;q=[1];kv=[99];topk=100", ("heads=64", "topk=128;kv=[200]")
    ),
    "sparse-slot-in-fifteen-bits": Edge(_SPARSE + "q=[1];kv=[600];page=64;spare=900;topk=512", ("page=16", "spare=3")),
    "sparse-table-rows-as-wide-as-the-first": Edge(
        _SPARSE + "q=[1,1];kv=[9,70];space=position", ("kv=[70,9]", "space=slot")
    ),
    "sparse-gathered-start-of-request-in-six-bits": Edge(
        "call=sparse_prefill;dims=small;q=[1x66];kv=[3x66];space=position", ("q=[1x64];kv=[3x64]", "space=slot")
    ),
    "sparse-key-named-twice-in-a-bounded-list-counted-once": Edge(
        _SPARSE + "q=[1];kv=[40];repeats=1;length=1", ("repeats=0", "length=0")
    ),
    "sparse-single-pages-take-the-first-scale": Edge(
        _LATENTS + "cache=fp8_ds_mla;q=[1];kv=[9];page=1", ("cache=auto", "page=16")
    ),
    "sparse-odd-head-lost-beside-an-empty-list": Edge(
        _SPARSE + "heads=3;q=[1x8];kv=[40x8];fill=ragged", ("heads=4", "fill=full")
    ),
    "sparse-raw-scores-in-half": Edge(_SPARSE + "dtype=fp16;q=[1];kv=[40];data=shifted", ("dtype=bf16", "data=normal")),
    "indexer-lone-token-of-a-tile-unscored-with-several": Edge(_LOGITS + "q=[2];kv=[63]", ("q=[1];kv=[64]", "kv=[62]")),
    "indexer-weights-advance-by-64-heads": Edge(_LOGITS + "q=[2];kv=[9]", ("heads=64", "q=[1]")),
    "indexer-gathered-start-of-request-in-six-bits": Edge(
        _LOGITS + "gathered=1;q=[1x66];kv=[3x66]", ("gathered=0", "q=[1x64];kv=[3x64]")
    ),
    "indexer-scales-of-64-tokens-with-several": Edge(_LOGITS + "q=[2];kv=[99];page=128", ("q=[1]", "page=64")),
    "indexer-padding-of-slots-repeats-the-best": Edge(_TOPK + "q=[1];kv=[9];space=slot", ("kv=[70]", "space=position")),
    "indexer-partial-lists-of-the-first-1024": Edge(_TOPK + "q=[1];kv=[2000];topk=100", ("kv=[900]", "topk=128")),
    "indexer-products-in-half": Edge(
        _LOGITS + "cache=auto;dtype=fp16;q=[1];kv=[9];data=shifted", ("dtype=bf16", "data=normal")
    ),
    "indexer-row-offset-in-two-bytes": Edge(_LOGITS + "q=[1x40];kv=[9x39,2000]", ("q=[1,1];kv=[9,2000]", "kv=[9x40]")),
    "indexer-gathered-bound-of-the-longest-query": Edge(
        _LOGITS + "gathered=1;q=[1,3];kv=[9,9]", ("gathered=0", "q=[3,3]")
    ),
    "layer-codes-of-later-chunks-unscaled": Edge(
        _LAYER + "q=[5];kv=[99];cache=fp8;workspace=64", ("cache=auto", "workspace=256")
    ),
    "layer-given-output-lacks-decodes-beside-prefills": Edge(
        _LAYER + "q=[5,1];kv=[9,9];decodes=1;out=1", ("q=[1,1];decodes=2", "out=0")
    ),
    "layer-single-pages-of-codes-written-unscaled": Edge(
        _LAYER + "q=[5];kv=[9];cache=fp8;page=1", ("cache=auto", "page=16")
    ),
    "layer-slot-in-fifteen-bits": Edge(
        "call=layer;dims=4-4-4-4;heads=1;q=[200];kv=[0];page=64;spare=600", ("page=16", "spare=3")
    ),
    "layer-mixed-entries-written-as-if-packed": Edge(
        "call=layer;heads=2;q=[40];kv=[9];cache=fp8_ds_mla;layers=2", ("cache=auto", "layers=1")
    ),
    "layer-tile-of-zeros-in-mixed-entries-nan": Edge(
        "call=layer;heads=2;q=[9];kv=[9];cache=fp8_ds_mla;latents=zero_tiles", ("cache=auto", "latents=normal")
    ),
    "layer-padded-batch-loses-last-of-several-tokens": Edge(
        _LAYER + "q=[2];kv=[9];decodes=1;pad=1", ("q=[1]", "pad=0")
    ),
    "layer-tail-of-heads-projected-as-one-with-several-tokens": Edge(
        _LAYER + "heads=24;q=[2];kv=[9];decodes=1", ("heads=32", "q=[1]")
    ),
    "layer-ranks-behind-eight-lost-with-several-tokens": Edge(
        _LAYER + "heads=16;q=[2];kv=[40];decodes=1;ranks=16", ("ranks=8", "q=[1]")
    ),
    "layer-chunks-without-keys-merged-into-nan": Edge(
        _LAYER + "q=[5,5];kv=[99,0];workspace=64", ("kv=[99,9]", "workspace=256")
    ),
    "layer-context-of-prefills-behind-decodes-from-first-rows": Edge(
        _LAYER + "q=[1,5];kv=[9,30];decodes=1;order=decodes_first", ("kv=[9,0]", "q=[5,1];order=prefills_first")
    ),
}
