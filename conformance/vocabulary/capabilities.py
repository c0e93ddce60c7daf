"""The capability vocabulary: what can be right or wrong about a backend, with definitions, clauses and cases.

Adding a capability is one entry here; if none of the procedures fits, one more in ``trials/procedures.py``. The
order goes from the general to the special, so that the first failed capability names a fault best. No torch: cases
are listed without it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import chain
from typing import Any

from mla_conformance.cases.case import Case
from mla_conformance.cases.combinations import PAIRS, TRIPLES, Space
from mla_conformance.cases.fields import Fields
from mla_conformance.roles.decode import lists as decode
from mla_conformance.roles.decode.space import DECODE
from mla_conformance.roles.indexer import lists as indexer
from mla_conformance.roles.layer import lists as layer
from mla_conformance.roles.layer.space import LAYER
from mla_conformance.roles.prefill import lists as prefill
from mla_conformance.roles.prefill.space import PREFILL
from mla_conformance.roles.sparse import lists as sparse
from mla_conformance.roles.sparse.space import SPARSE
from mla_conformance.vocabulary import lists
from mla_conformance.vocabulary.smoke import smoke_cases, with_killing


class Tier(StrEnum):
    """How many of the cases are run."""

    SMOKE = "smoke"
    """The first cases of each capability, those that killed known defects, and every value of what is combined."""
    FULL = "full"
    """All cases; they hold every pair of these values."""
    NIGHTLY = "nightly"
    """Those and every triple, and long contexts."""


class CapabilityError(ValueError):
    """An unknown capability or tier."""


@dataclass(frozen=True)
class Capability:
    """One entry of the vocabulary.

    Attributes:
        name: as in ids, markers and reports.
        clause: clause of SPEC.md that the definition rests on.
        definition: one sentence.
        cases: the cases that decide it, the most telling first.
        smoke: those of them that the smoke tier takes.
        procedure: what is done with a backend, by its name in ``trials/procedures.py``.
        probes_refusals: also run what the backend declares unsupported, which it must refuse.
        needs: the attribute of a declaration without which it is unsupported; empty if there is none.
        needs_cuda: there is nothing to judge on another device.
        captures: a GPU captures the calls in a graph, if the backend declares that it may.
    """

    name: str
    clause: str
    definition: str
    cases: tuple[Case, ...]
    smoke: tuple[Case, ...]
    procedure: str = "conforms"
    probes_refusals: bool = False
    needs: str = ""
    needs_cuda: bool = False
    captures: bool = False

    @property
    def profile(self) -> str:
        """What it asks of a device, in the names of must-pass profiles; empty if nothing."""
        return "graph" if self.captures else "cuda" if self.needs_cuda else ""

    def select(self, tier: Tier) -> tuple[Case, ...]:
        """The cases of a tier."""
        if tier is Tier.SMOKE:
            return self.smoke
        return self.cases if tier is Tier.FULL else (*self.cases, *nightly_cases(self.name))


def _entry(
    name: str,
    clause: str,
    definition: str,
    *cases: Callable[[], Iterable[Fields]],
    **further: Any,
) -> Capability:
    built = tuple(Case.of(capability=name, **fields) for fields in chain.from_iterable(make() for make in cases))
    return Capability(name, clause, definition, built, smoke_cases(built), **further)


_VOCABULARY = (
    _entry("new_tokens", "3.1", "New tokens attend causally to each other within their request.", prefill.new_tokens),
    _entry("lse", "1.4", "The LSE is the natural logarithm, float32, [heads, tokens], by value.", prefill.lse),
    _entry("mla_dims", "2.1", "Every declared combination of head dims is computed right.", prefill.mla_dims),
    _entry("head_counts", "2.1", "Any number of heads on this rank is computed right.", prefill.head_counts),
    _entry("empty_rows", "1.6", "A row that sees no key is 0 with LSE -inf, wherever it stands.", prefill.empty_rows),
    _entry("context_chunk", "3.1", "New tokens attend, unmasked, to a chunk of context.", prefill.context_chunk),
    _entry(
        "chunked_context",
        "1.7",
        "Chunks of a paged context and the new tokens, merged by LSE, equal unchunked attention.",
        prefill.chunked_context,
    ),
    _entry(
        "merge_states", "1.7", "The backend's own merge of partial states obeys the merge law.", prefill.merge_states
    ),
    _entry("weights", "1.1", "The weights of a row add up to 1, hot keys and diffuse tails included.", prefill.weights),
    _entry("logit_range", "1.1", "Logits far larger than usual are computed right.", prefill.logit_range),
    _entry(
        "shift_invariance", "1.1", "A constant on all logits of a row changes its LSE only.", prefill.shift_invariance
    ),
    _entry("softmax_scale", "1.3", "The softmax scale is the given one, not one of a head dim.", prefill.softmax_scale),
    _entry("token_counts", "2.1", "Any number of tokens and requests is computed right.", prefill.token_counts),
    _entry("dtypes", "4.2", "Every declared dtype stays within its own error budget.", prefill.dtypes),
    _entry("v_padding", "3.3", "Padding of V never shows in the result's shape or values.", prefill.v_padding),
    _entry("strided_inputs", "3.2", "Strided views of q, k and v are read as what they are.", prefill.strided_inputs),
    _entry("out_tensor", "3.4", "A given out tensor holds the result, nothing around it changes.", prefill.out_tensor),
    _entry(
        "quant_output_fp8",
        "3.5",
        "Fused e4m3 output stores the rounded, saturated code of value / output_scale.",
        prefill.quant_output_fp8,
    ),
    _entry(
        "fp8_operands",
        "3.1",
        "Operands in e4m3 are the values that they stand for; the output is bf16, held to P's declared class.",
        prefill.fp8_operands,
    ),
    _entry(
        "decode",
        "6.2",
        "One query token a request attends, absorbed, to the request's cached latents.",
        decode.outputs,
    ),
    _entry("decode_lse", "1.4", "The LSE of a decode is the natural logarithm, by value.", decode.lses),
    _entry(
        "decode_multi_token",
        "6.2",
        "Several query tokens a request, as many for each or not, see what stands before them.",
        decode.several_tokens,
    ),
    _entry(
        "paged_cache",
        "6.3",
        "Pages of any declared size are read by block table and strides, and nothing else of the cache matters.",
        decode.pages,
    ),
    _entry(
        "kv_cache_fp8",
        "6.4",
        "Codes of an e4m3 cache mean code × k_scale, latent and rope alike; no other cache knows the scale.",
        decode.fp8,
    ),
    _entry(
        "kv_cache_fp8_ds_mla",
        "6.5",
        "Each tile of a mixed entry has a float32 scale, its rope values have none.",
        decode.fp8_ds_mla,
    ),
    _entry(
        "dcp",
        "6.6",
        "Ranks that share a sequence each return the state of their tokens; merged they equal one rank.",
        decode.dcp,
    ),
    _entry(
        "model_shapes",
        "2.1",
        "All heads of a model, with hundreds of rows, keys and requests, are computed right.",
        lists.model_prefills,
        lists.model_decodes,
        sparse.model_shapes,
    ),
    _entry(
        "mixed_batch",
        "6.7",
        "A layer computes prefills and decodes of one batch, in either order, over one paged cache.",
        layer.mixed_batch,
    ),
    _entry(
        "cache_write",
        "6.7",
        "New latents stand in their slots, nothing else of the cache changes; blocks are copied byte by byte.",
        layer.cache_write,
        procedure="cache_write",
    ),
    _entry(
        "weight_absorption",
        "6.7",
        "The absorbed weights are those of kv_b_proj, for every head, also after these were replaced.",
        layer.weight_absorption,
        procedure="weight_absorption",
    ),
    _entry(
        "prefill_decode_agreement",
        "6.7",
        "The same tokens give the same result and the same cache, whether they prefill or decode.",
        layer.prefill_decode_agreement,
        procedure="prefill_decode_agreement",
    ),
    _entry(
        "graph_padding",
        "6.8",
        "Rows of padding, with no token, slot -1 and block -1, are 0 and leave everything else as it is.",
        layer.graph_padding,
    ),
    _entry(
        "graph_replay",
        "6.8",
        "A layer over a graph's buffers computes the batch that was loaded into them last.",
        layer.graph_replay,
        procedure="layer_graph",
        captures=True,
    ),
    _entry(
        "layer_dcp",
        "6.6",
        "On ranks that share the tokens a layer writes those of each rank, and its results are those of one rank.",
        layer.dcp,
    ),
    _entry(
        "sparse_decode",
        "7.2",
        "Each query token attends, absorbed, to the entries of a paged cache that its list names.",
        sparse.decodes,
    ),
    _entry(
        "sparse_prefill",
        "7.3",
        "Each query token attends, absorbed, to the gathered keys that its list names.",
        sparse.prefills,
    ),
    _entry(
        "sparse_lse",
        "7.4",
        "The LSE over selected keys is the natural logarithm, by value, and -inf where none is named.",
        sparse.lses,
    ),
    _entry(
        "selection_padding",
        "7.5",
        "-1 names no key, wherever it stands in a list and however often.",
        sparse.padding,
        procedure="selection_padding",
    ),
    _entry(
        "selection_length",
        "7.5",
        "From its length on nothing of a list has an influence, whatever it holds.",
        sparse.lengths,
    ),
    _entry(
        "selection_order",
        "7.5",
        "The order of a list has no influence, and a key that it names twice counts twice.",
        sparse.orders,
        procedure="selection_order",
    ),
    _entry(
        "selection_rows",
        "7.5",
        "A row's result depends on its own list alone.",
        sparse.rows,
        procedure="selection_rows",
    ),
    _entry(
        "index_spaces",
        "7.6",
        "The numbers of a list count what the metadata say: slots, positions, or tokens of this rank.",
        sparse.spaces,
    ),
    _entry(
        "unselected_keys",
        "7.5",
        "What no list names has no influence, and nothing is read through an entry that does not count.",
        sparse.unselected,
    ),
    _entry(
        "attention_sinks",
        "7.7",
        "A sink takes its share of the output, and none of the LSE.",
        sparse.sinks,
    ),
    _entry(
        "second_cache",
        "7.8",
        "Keys of a second cache, named by lists of their own, count beside those of the first.",
        sparse.second_cache,
    ),
    _entry(
        "sparse_fp8",
        "6.4",
        "Codes of an e4m3 cache mean code × k_scale to lists as well.",
        sparse.fp8,
    ),
    _entry(
        "sparse_fp8_ds_mla",
        "6.5",
        "Entries of 656 bytes: four tiles of codes, each with a float32 scale, and rope as it is.",
        sparse.fp8_ds_mla,
    ),
    _entry(
        "sparse_fp8_v4",
        "7.9",
        "Entries of 584 bytes, the exponents of a page's tiles behind the data of the whole page.",
        sparse.fp8_v4,
    ),
    _entry(
        "sparse_fp8_v41",
        "7.9",
        "Entries of 528 bytes: sixteen tiles of codes, rope among them, each with an exponent.",
        sparse.fp8_v41,
    ),
    _entry(
        "sparse_fp4_v41",
        "7.9",
        "Entries of 288 bytes in a second cache: e2m1 codes, the first of two in the low half, under e4m3 scales.",
        sparse.fp4_v41,
    ),
    _entry(
        "sparse_dcp",
        "7.10",
        "Ranks that share a sequence return the state of the selected keys that they hold; merged they equal one rank.",
        sparse.dcp,
    ),
    _entry(
        "indexer_logits",
        "8.3",
        "An indexer scores every token that a row sees, paged or gathered, with any number of heads.",
        indexer.logits,
    ),
    _entry(
        "indexer_topk",
        "8.5",
        "An indexer selects the tokens with the best scores, each once, and -1 where there are fewer.",
        indexer.selections,
    ),
    _entry(
        "indexer_causal",
        "8.1",
        "A row sees the tokens of its request up to its own, and selects no other.",
        indexer.bounds,
    ),
    _entry(
        "indexer_fp8",
        "8.2",
        "Codes of index keys mean code × the scale of their token.",
        indexer.codes,
    ),
    _entry(
        "index_mapping",
        "8.4",
        "Selected tokens are told as slots of the cache, or rows of gathered keys, where that is asked for.",
        indexer.mappings,
    ),
    _entry(
        "determinism",
        "3.7",
        "Equal calls return equal bits, if the backend declares so.",
        prefill.determinism,
        decode.determinism,
        layer.determinism,
        sparse.determinism,
        indexer.repeated,
        needs="deterministic",
        procedure="determinism",
    ),
    _entry(
        "call_order",
        "3.7",
        "A result depends on its call and the metadata last prepared, not on earlier calls.",
        prefill.call_order,
        decode.call_order,
        layer.call_order,
        sparse.call_order,
        indexer.repeated,
        procedure="call_order",
    ),
    _entry(
        "no_side_effects",
        "3.6",
        "Inputs and excluded bytes keep their values and have no influence; results stay as returned.",
        prefill.no_side_effects,
        decode.no_side_effects,
        layer.no_side_effects,
        sparse.no_side_effects,
        indexer.repeated,
        procedure="no_side_effects",
    ),
    _entry(
        "batch_invariance",
        "3.7",
        "A request's result does not depend on the others of its batch.",
        prefill.batches,
        decode.batches,
        layer.batches,
        sparse.batches,
        indexer.repeated,
        procedure="batch_invariance",
    ),
    _entry(
        "request_order",
        "3.7",
        "Permuted requests give permuted results.",
        prefill.batches,
        decode.batches,
        layer.batches,
        sparse.batches,
        indexer.repeated,
        procedure="request_order",
    ),
    _entry(
        "neighbours",
        "3.7",
        "Queries of one request that are no numbers, or too large ones, change no other request.",
        prefill.neighbours,
        decode.neighbours,
        sparse.neighbours,
        indexer.repeated,
        procedure="neighbours",
    ),
    _entry(
        "neighbour_keys",
        "3.7",
        "Keys and values of one request that are no numbers, or too large ones, change no other request.",
        prefill.neighbours,
        decode.neighbours,
        sparse.neighbours,
        indexer.repeated,
        procedure="neighbour_keys",
    ),
    _entry(
        "causal_prefix",
        "1.5",
        "The first rows of a request do not depend on its later tokens.",
        prefill.prefixes,
        procedure="causal_prefix",
    ),
    _entry(
        "split_invariance",
        "1.7",
        "Any chunking of the context gives the same state.",
        prefill.splits,
        procedure="split_invariance",
    ),
    _entry(
        "v_linearity",
        "1.1",
        "Values times a power of two give exactly that multiple.",
        prefill.value_factors,
        procedure="v_linearity",
    ),
    _entry(
        "loose_maxima",
        "3.7",
        "Maxima in the metadata may exceed the true ones.",
        prefill.loose_maxima,
        decode.loose_maxima,
        sparse.loose_maxima,
    ),
    _entry(
        "refusals",
        "3.8",
        "What is declared unsupported is refused with an exception, what is declared supported runs.",
        prefill.refusals,
        decode.refusals,
        sparse.refusals,
        probes_refusals=True,
        procedure="refuses_or_conforms",
    ),
    _entry(
        "cuda_graph",
        "3.9",
        "A captured call, replayed, computes the batch that stands in its buffers then.",
        lists.cuda_graph,
        sparse.cuda_graph,
        procedure="graph",
        captures=True,
    ),
    _entry(
        "streams",
        "3.9",
        "A call reads and writes in the order of the caller's stream, beside others on other streams.",
        lists.streams,
        sparse.streams,
        procedure="streams",
        needs_cuda=True,
    ),
    _entry(
        "large_offsets",
        "3.9",
        "Operands and results that reach beyond 2^31 elements are read and written there.",
        lists.large_offsets,
        sparse.large_offsets,
        procedure="far",
        needs_cuda=True,
    ),
    _entry(
        "many_rows",
        "3.9",
        "Around 2^16 rows in a call are all computed right.",
        lists.many_rows,
        sparse.many_rows,
        needs_cuda=True,
    ),
)

_LISTED = [case for entry in _VOCABULARY for case in entry.cases]
_LISTED_SMOKE = [case for entry in _VOCABULARY for case in entry.smoke]


def _together(space: Space, clause: str, definition: str) -> Capability:
    pairs = space.further_cases(_LISTED, PAIRS)
    smoke = with_killing(pairs, space.telling_cases(pairs, _LISTED_SMOKE))
    return Capability(space.capability, clause, definition, pairs, smoke)


# The last, since they show that something fails together with others, where any other capability says what it is.
_COMBINED = (
    _together(PREFILL, "3.1", "What other capabilities vary one by one is computed right together."),
    _together(DECODE, "6.2", "What other capabilities vary one by one is computed right together, of a decode."),
    _together(LAYER, "6.7", "What other capabilities vary one by one is computed right together, of a layer."),
    _together(SPARSE, "7.2", "What other capabilities vary one by one is computed right together, of selected keys."),
)

SPACES: dict[str, Space] = {space.capability: space for space in (PREFILL, DECODE, LAYER, SPARSE)}

CAPABILITIES: dict[str, Capability] = {entry.name: entry for entry in (*_VOCABULARY, *_COMBINED)}


def nightly_cases(capability: str) -> tuple[Case, ...]:
    """What the nightly tier adds to a capability's cases."""
    if capability in SPACES:
        return _triples(capability)
    return tuple(case for case in lists.LONG_CONTEXTS if case.capability == capability)


@cache
def _triples(capability: str) -> tuple[Case, ...]:
    return SPACES[capability].further_cases([case for entry in CAPABILITIES.values() for case in entry.cases], TRIPLES)


def find_capability(name: str) -> Capability:
    """The entry of this name.

    Raises:
        CapabilityError: there is none; the message lists the names.
    """
    if name not in CAPABILITIES:
        raise CapabilityError(f"unknown capability '{name}'; expected one of {', '.join(CAPABILITIES)}")
    return CAPABILITIES[name]


def find_tier(name: str) -> Tier:
    """The tier of this name.

    Raises:
        CapabilityError: there is none; the message lists the names.
    """
    if name not in list(Tier):
        raise CapabilityError(f"unknown tier '{name}'; expected one of {', '.join(Tier)}")
    return Tier(name)
