"""Figures of README and docs that follow from the code, and pages that are written from it."""

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

from mla_conformance.backends.flash_mla_sparse import FlashMLASparseBackend
from mla_conformance.cases.case import Case
from mla_conformance.cases.fitting import MOST_TRIPLES
from mla_conformance.cases.grammar import LARGEST, MOST_REQUESTS
from mla_conformance.commands.replay import PROBABILITY
from mla_conformance.defects.report import PROMISED
from mla_conformance.diagnosis.explain import ALIKE, UNALIKE
from mla_conformance.diagnosis.heat_map import MOST
from mla_conformance.engine.devices import WORKER_BYTES
from mla_conformance.engine.folder import KEPT_BYTES
from mla_conformance.engine.pool import GIVE_UP_AFTER
from mla_conformance.export.inputs import MOST_BYTES
from mla_conformance.export.script import MOST_LINES
from mla_conformance.files.inputs import MOST_MEBIBYTES
from mla_conformance.judging.judged_rows import DRAWN_ROWS, FULL_OPERATIONS
from mla_conformance.judging.record import detection
from mla_conformance.models.caselist import cases_of
from mla_conformance.models.profile import Deployment
from mla_conformance.models.stored import find_model
from mla_conformance.problems.cpu_room import ZONE
from mla_conformance.problems.fences import ALIGNMENT
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.report.differences import DRIFT
from mla_conformance.report.terminal import MESSAGE, columns
from mla_conformance.roles.decode.case import DecodeCase
from mla_conformance.trials.context import GOLDEN_BYTES, PROBLEM_BYTES
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier, long_contexts

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / "ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose(page: Path) -> str:
    """A page without blocks of code, links' targets and what commands write into it, on one line."""
    text = re.sub(r"<!-- ([\w:-]+):begin -->.*?<!-- \1:end -->", "", page.read_text("utf-8"), flags=re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"\]\([^)]*\)", "", text))


def short(number: float) -> str:
    """2e13, and not 2e+13."""
    return f"{number:.0e}".replace("e+", "e").replace("e-0", "e-")


def mebibytes(number: int) -> str:
    return f"{number // 2**20} MiB"


def width(columns_variable: str) -> int:
    with patch.dict(os.environ, {"COLUMNS": columns_variable}):
        return columns()


def smoke(capability: str) -> tuple[Case, ...]:
    return CAPABILITIES[capability].select(Tier.SMOKE)


def lines_of_the_tutorials_kernel() -> int:
    tutorial = (DOCS / "tutorial.md").read_text("utf-8")
    return tutorial.partition("```python\n")[2].partition("```")[0].count("\n")


def of_models() -> Iterator[str]:
    """What is said of the cases of a model, here DeepSeek-V3, and of caches and kernels."""
    profile = find_model("deepseek-v3")
    cases = cases_of(profile, Deployment.of(profile, 8, "auto"))
    decodes = [case for case in cases if isinstance(case, DecodeCase)]
    requests, pages = [len(case.q) for case in decodes], sorted({case.page for case in decodes} - {64})
    tokens = max(max(case.kv) for case in decodes)
    yield f"batches of {min(requests)} to {max(requests)} requests, up to {tokens:,} tokens"
    yield f"pages of 64 tokens and a few cases with pages of {', '.join(map(str, pages[:-1]))} and {pages[-1]};"
    few, many = FlashMLASparseBackend.supported_heads
    yield f"take {few} heads or {many}, and engines fill up the heads of a rank. With fewer than {few} heads per rank"
    yield from (f"{TILED_FORMATS[name].width} bytes a token" for name in ("fp8_ds_mla", "fp8_v4"))
    window = find_model("deepseek-v4-flash").selection
    assert window is not None
    yield f"has a window of {window.topk} keys"


def of_mixed_entries() -> str:
    """The bytes of an entry of fp8_ds_mla."""
    form = TILED_FORMATS["fp8_ds_mla"]
    parts = f"{form.coded} {form.codes} codes, {form.tiles} {form.scales} scales, {form.plain} rope values"
    return f"{form.width} bytes: {parts} | code d × scale[d // {form.tile}]"


@cache
def stated() -> dict[str, list[str]]:
    """Sentences of each page with the figures that the code has today."""
    return {
        "README.md": [f"has one in {lines_of_the_tutorials_kernel()} lines"],
        "docs/bump.md": [f"no error grew by over {DRIFT} of its budget"],
        "docs/certify-a-model.md": [*of_models()],
        "docs/cost.md": [
            f"one for each {WORKER_BYTES // 2**30} GiB of its memory",
            f"more than {short(FULL_OPERATIONS['cuda'])} useful operations",
            f"({short(FULL_OPERATIONS['cpu'])} on a CPU)",
            f"{DRAWN_ROWS} drawn ones",
            f"touches 1 % of the rows is among them: {detection(DRAWN_ROWS, 0.01):.3f}",
            f"results, up to {mebibytes(GOLDEN_BYTES['cpu'])} on a CPU and {mebibytes(GOLDEN_BYTES['cuda'])} on a GPU",
            f"up to {mebibytes(PROBLEM_BYTES['cpu'])} and {mebibytes(PROBLEM_BYTES['cuda'])}",
            f"up to {MOST_TRIPLES} cases a role for triples of classes",
            f"contexts up to {max(max(case.kv, default=0) for case in long_contexts()):,} tokens",
        ],
        "docs/gate-your-repository.md": [
            f"uses over {DRIFT} more of its error budget",
            f"refuse files above {MOST_MEBIBYTES} MiB",
            f"a case of more than {MOST_REQUESTS:,} requests or 2^{LARGEST.bit_length() - 1} tokens",
            f"cut messages to {MESSAGE // 2**10} KiB",
        ],
        "docs/known-defects.md": [f"promises {PROMISED[Tier.SMOKE]:.0%} of them".replace("%", " %")],
        "docs/python-api.md": [of_mixed_entries()],
        "docs/reading-a-report.md": [
            f"reproduces {100 * ALIKE:.0f} % of the wrong numbers",
            f"none reproduced as much as {100 * UNALIKE:.0f} %",
            f"the first {KEPT_BYTES // 2**20} MiB of it",
            f"by default {GIVE_UP_AFTER}, the rest",
            f"up to {MOST} × {MOST}:",
        ],
        "docs/races.md": [f"with {PROBABILITY * 100:.0f} %;"],
        "docs/reads-beyond.md": [f"granules of {mebibytes(ZONE)}", f"multiples of {ALIGNMENT} bytes."],
        "docs/replay.md": [
            f"has at most {MOST_LINES} lines;",
            f"more than {MOST_LINES} lines |",
            f"more than {MOST_BYTES} characters",
        ],
        "docs/running.md": ["from {} to {} columns; where there is none, {} or".format(*map(width, ("1", "999", "")))],
        "docs/tutorial.md": [f"`✔ new_tokens {len(smoke('new_tokens'))}`"],
    }


@pytest.mark.parametrize("page", stated())
def test_figures_of_a_page_are_those_of_the_code(page: str) -> None:
    text = prose(ROOT / page)
    for sentence in stated()[page]:
        assert sentence in text, f"{page}: expected: {sentence}"


def test_pages_show_what_commands_print_and_what_the_code_says() -> None:
    for section, content in load("pages").sections(ROOT):
        if section.path.name != "commands.md" or sys.version_info[:2] == (3, 11):  # argparse's layout differs
            assert section.content.strip() == content.strip(), f"{section.path.name}: run python ci/pages.py"


def test_what_commands_print_is_shown_at_80_columns() -> None:
    """But for a word that is longer, as some ids are."""
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        shown = "".join(re.findall(r"^```text\n(.*?)^```$", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL))
        wide = [line for line in shown.splitlines() if len(line) > 80 and len(max(line.split(), key=len)) <= 80]
        assert wide == [], page.name
