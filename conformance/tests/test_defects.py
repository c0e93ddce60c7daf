"""Known defects die where they should, in every generation, and honest bases live; the stored figures are of it."""

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cases.work import work_of
from mla_conformance.defects import known
from mla_conformance.defects.bases import Capturable
from mla_conformance.defects.honest import HONEST
from mla_conformance.defects.known import known_defects
from mla_conformance.defects.report import as_expected, deciding_digest, markdown, stored
from mla_conformance.files.whole import section_of
from mla_conformance.judging.record import Check, Record, Status
from mla_conformance.roles.prefill.case import PrefillCase
from mla_conformance.tests.drawn import judged
from mla_conformance.trials.trial import Context
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier

DEFECTS = known_defects()
REGENERATE = "run `mla-conformance defects --tier smoke --out fixtures/defects.json --page docs/known-defects.md`"


def test_each_known_defect_has_an_id_of_its_own_a_sentence_and_capabilities_that_exist() -> None:
    assert len(DEFECTS) == len(known._KERNELS)
    for entry in DEFECTS.values():
        assert entry.sentence and {entry.killed_by, *entry.related} <= {*CAPABILITIES}, entry.id


AT = r"at request \d+, query \d+"
SAID_OF_DEFECTS: dict[str, tuple[Check, str]] = {
    "paged-causal-fully-masked-finite-lse": (Check.MASK, f"LSE is .* {AT}, head 0, expected -inf, no key is visible"),
    "empty-chunk-finite-lse-garbage-out": (Check.MASK, f"output is .* where no key is visible, expected 0, {AT}"),
    "lse-base2-merged-as-natural-prefix-chunk": (Check.LSE, "in base 2, expected the natural logarithm"),
    "lse-layout-tokens-heads-vs-heads-tokens": (Check.LSE, r"the LSE is transposed, expected \[heads, tokens\]"),
    "bmm-fp8-quant-inverted-scale": (Check.OUTPUT, r"\d+ codes outside the allowed interval"),
    "quant-output-unsaturated-with-lse": (Check.MASK, f"output is nan {AT}"),
    "silent-noop-feature-on-fallback-backend": (Check.OUT_TENSOR, "does not share the storage of out="),
    "fp4-swizzled-scale-buffer-underallocated": (Check.OUT_OF_BOUNDS_WRITE, r"\d+ bytes around out= were overwritten"),
    "ubatch-workspace-slot-misrouted": (Check.STALE_RESULT, "a later call overwrote the result of an earlier one"),
    "refusal-after-the-output-was-cleared": (Check.UNSAFE_REFUSAL, r"wrote \d+ bytes of or around out= before it rai"),
    "refusal-leaves-the-default-dtype": (Check.PROCESS_STATE, "changed the process: default dtype from torch.float32"),
    "prefill-accumulator-cleared-by-multiplication": (Check.MASK, r"^beside request \d, whose queries hold NaN: "),
    "decode-single-request-path-stays": (Check.MASK, "of this instance, behind “.*”; on a new instance it is right"),
    "indexer-relu-dropped": (Check.SCORE, f"score is .* of token .* {AT}, expected"),
    "indexer-token-twice": (Check.SELECTION, rf"token \d+ is selected twice, {AT}"),
    "indexer-tail-not-selected": (Check.SELECTION, rf"\d+ tokens are selected, expected \d+ of \d+, {AT}"),
    "indexer-positions-for-slots": (Check.SELECTION, rf"\d+ is no token of the request, {AT}"),
    "indexer-bound-off-by-one": (Check.SELECTION, r"token (\d+) is selected, expected those below \1"),
    "topk-padding-in-front": (Check.SELECTION, "-1 stands before a column"),
    "topk-bits-of-negatives-unflipped": (Check.SELECTION, "not in descending order, which is declared"),
    "topk-coarse-bins-alone": (Check.SCORE, r"token \d+ with score .* is left out for token \d+ with "),
    "pools-as-many-as-tokens": (Check.SELECTION, r"top-k of pools: \d+ tokens are selected, expected \d+ of "),
    "prepare-codes-truncated": (Check.PREPARED, "code of keys means "),
    "prepare-norm-bias-dropped": (Check.PREPARED, "scale of keys is "),
    "prepare-weights-without-scale": (Check.PREPARED, "scale of queries, as the weights have it, is "),
    "cache-writer-takes-latents-for-packed": (Check.CACHE, r"the entry of slot \d+ of the cache is not the new token"),
    "cache-writer-converts-through-fp16": (Check.CACHE, r"the latent in slot \d+ of the cache is not the code neare"),
    "compress-states-in-16-bits": (
        Check.WRITTEN,
        r"entry 0 of request 0, in slot \d+ of the cache, is .* in column \d",
    ),
    "layer-single-pages-of-codes-written-unscaled": (Check.CACHE, r"the rope key in slot \d+ of the cache is not the"),
    "sparse-layer-shared-buffer-cleared": (Check.WRITTEN, r"row \d+ was written, expected it as it was"),
    "sparse-layer-own-token-always-selected": (Check.WRITTEN, r"row \d+ \(query 0 of request 0\) names \d of 8 tokens"),
    "sparse-layer-padding-written-to-the-last-slot": (Check.WRITTEN, r": kv_cache: slot \d+ of the cache was written"),
    "sparse-layer-index-keys-in-latent-slots": (Check.WRITTEN, r"index_kv_cache: slot \d+ of the cache was written"),
    "sparse-layer-first-rank-writes-latents": (Check.WRITTEN, "on rank 1, kv_cache: the entry of slot "),
}


@pytest.mark.parametrize("capability", sorted({entry.killed_by for entry in DEFECTS.values()}))
def test_every_known_defect_is_killed_by_its_case_which_its_honest_base_passes(capability: str) -> None:
    """All of them: one that nothing kills any more is a hole in the judge, whichever step it stands in."""
    context, passed = Context(), set[tuple[type, str]]()
    for entry in (each for each in DEFECTS.values() if each.killed_by == capability):
        case = stored().killing_cases[entry.id]
        base = next(cls for cls in entry.kernel.__mro__ if cls in (*HONEST, EagerDecodeBackend))
        if issubclass(entry.kernel, Capturable):
            base = next(cls for cls in HONEST if issubclass(cls, Capturable) and issubclass(cls, base))
        assert Case.parse(case).capability == capability
        record = judged(entry.kernel, case, context)
        assert record.failed, f"{case} does not kill {entry.id}; {REGENERATE}"
        check, said = SAID_OF_DEFECTS.get(entry.id, (record.check, ""))
        assert record.check == check and re.search(said, f"{record.message} · {record.finding}"), record
        if capability == "memory_bounds":
            verb = "writes" if "-writes-" in entry.id else "reads"
            side = "before the beginning of" if "before" in entry.id else "behind the end of"
            assert f"{verb} byte " in record.message and side in record.message, entry.id
        if (base, case) not in passed:
            assert judged(base, case, context).status is Status.PASS
            passed.add((base, case))


def test_the_stored_report_is_of_this_code_clean_and_on_its_page() -> None:
    report = stored()
    assert deciding_digest() in report.digests, f"the stored report is stale; {REGENERATE}"
    assert (report.survivors, report.false_alarms) == ([], [])
    assert all(as_expected(entry, report.kills[entry.id]) for entry in DEFECTS.values())
    assert report.honest_pairs >= 2000 and report.kills.keys() == report.killing_cases.keys() == DEFECTS.keys()
    taken = {case.id for capability in CAPABILITIES.values() for case in capability.select(Tier.SMOKE)}
    assert set(report.killing_cases.values()) <= taken
    written = section_of(Path(__file__).parents[2] / "docs" / "known-defects.md", "defects")[1].strip()
    assert written == markdown(report), f"the page's section is stale; {REGENERATE}"


def test_the_command_rewrites_the_section_and_nothing_else(tmp_path: Path, told: Any, monkeypatch: Any) -> None:
    """A kill of an honest kernel is a false alarm, and one by an unrelated capability leaves a survivor."""
    (entry, *_) = DEFECTS.values()
    unrelated = next(name for name in CAPABILITIES if name not in (entry.killed_by, *entry.related))
    killed = {entry.id: {unrelated, entry.killed_by}, "EagerPrefillBackend": {unrelated}}
    monkeypatch.setattr("mla_conformance.defects.report.run_matrix", lambda tier, cores: outcomes(killed))
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- defects:begin -->stale<!-- defects:end -->\nafter\n")
    out = told(1, "defects", "--tier", "full", "--page", path)
    assert f"0 of {len(DEFECTS)} known defects killed as expected · " in out
    assert "FALSE ALARM EagerPrefillBackend on new_tokens" in out and f"ALIVE {entry.id}" in out
    written = path.read_text(encoding="utf-8")
    assert written.startswith("before\n<!-- defects:begin -->\n0 of ") and "stale" not in written
    assert written.endswith("<!-- defects:end -->\nafter\n")


def outcomes(killed: dict[str, set[str]]) -> Iterator[Record]:
    """Two outcomes of each capability for the honest kernel and the first known defect, ``killed`` by kernel."""
    for kernel, name, tokens in product(("EagerPrefillBackend", next(iter(DEFECTS))), CAPABILITIES, (1, 2)):
        status = Status.FAIL if name in killed.get(kernel, ()) else Status.PASS
        yield Record(kernel, kernel, name, f"{name}:q=[{tokens}]", status, message="wrong")


ROLES = {name: {case.role for case in entry.cases} for name, entry in CAPABILITIES.items()}
PREFILLING = {CAPABILITIES[name].procedure: name for name, roles in ROLES.items() if roles == {Role.PREFILL}}
DIES = ("lse-layout-tokens-heads-vs-heads-tokens", "prefill-plan-key-has-ends-only", "refusal-leaves-the-default-dtype")
"""A wrong result, a plan that is kept too long, and what a refusal leaves behind."""
IMPORTS = "from mla_conformance.backends.generations.{generation} import *\nfrom {module} import {kernel}\n"
DEFECT = {
    "present": IMPORTS + "class Wrong(PresentEagerPrefillBackend, {kernel}): ...\n",
    "earlier": IMPORTS + "class Impl(EagerPrefillImpl):\n    kernel = {kernel}\n"
    "class Wrong(EarlierEagerPrefillBackend):\n    get_prefill_impl_cls = staticmethod(lambda: Impl)\n",
}


@pytest.mark.parametrize("capability", PREFILLING.values())
def test_eager_has_the_same_verdict_in_every_generation(capability: str) -> None:
    case = min(CAPABILITIES[capability].select(Tier.SMOKE), key=work_of)
    names = ("EAGER", "EAGER[present]", "EAGER[earlier]")
    plain, present, earlier = (judged(name, case).status for name in names)
    assert present is plain
    assert isinstance(case, PrefillCase)
    lacking = case.own_merge or case.quant != "none"
    assert earlier is (Status.UNSUPPORTED if lacking else plain)


@pytest.mark.parametrize("id", DIES)
@pytest.mark.parametrize("generation", DEFECT)
def test_a_known_defect_dies_in_every_generation(generation: str, id: str, tmp_path: Path) -> None:
    kernel = DEFECTS[id].kernel
    path = tmp_path / f"{generation}_{kernel.__name__}.py"
    names = {"generation": generation, "module": kernel.__module__, "kernel": kernel.__name__}
    path.write_text(DEFECT[generation].format(**names), encoding="utf-8")
    assert judged(f"{path}:Wrong", stored().killing_cases[id]).failed
