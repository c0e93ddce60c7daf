"""What users get: pages that are short, plain and true, and a wheel that holds what the checkout holds."""

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from mla_conformance.files.whole import section_of
from mla_conformance.tests.reports import script
from mla_conformance.version import __version__
from mla_conformance.vocabulary.capabilities import Tier, find_capability

ROOT = Path(__file__).parents[2]
README, DOCS = ROOT / "README.md", ROOT / "docs"
CI = (ROOT / ".ci" / "run").read_text("utf-8")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_continuous_integration_the_image_and_the_dev_container_do_as_the_readme_does() -> None:
    two, own, gate = [block for block in blocks("bash") if block.startswith("pip install -c")], *blocks("bash")[2:]
    ran = re.findall(r'^run "((?:pip install|mla-conformance certify).* && .*)"$', CI, flags=re.MULTILINE)
    assert len(two) == 2 and own.endswith(" --backend my_backend.py:MyBackend\n")  # which the tutorial's test runs
    assert ran == [two[0].strip(), gate.strip().replace("\n", " && "), two[1].strip()]
    image, text = (ROOT / "Dockerfile").read_text("utf-8"), README.read_text("utf-8")
    assert "pip install --no-cache-dir -c ci/constraints.txt ." in image and "ARG TORCH=cpu" in image
    (url,) = re.findall(r"PIP_EXTRA_INDEX_URL=([^\s`]+)", text)
    assert url in image and "--build-arg TORCH=cuda" in text
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text("utf-8"))
    assert (ROOT / ".devcontainer" / container["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert container["postCreateCommand"] in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_place_in_it(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"(?:\]\(|src(?:set)?=\"|href=\")([^)\s\"]+)", prose):
        if "://" in target:
            continue
        path, _, place = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        # The site is made of docs/ alone.
        inside = Path(os.path.normpath(page.parent / path)).is_relative_to(DOCS)
        assert inside or not page.is_relative_to(DOCS), f"{page.name}: {target} leads out of docs/"
        assert not place or place in anchors(there), f"{page.name}: {target}"


def test_pages_show_what_commands_print_and_what_the_code_says() -> None:
    for path, name, content in script("pages").sections(ROOT):
        if path.name != "commands.md" or sys.version_info[:2] == (3, 11):  # argparse's layout differs
            assert section_of(path, name)[1].strip() == content.strip(), f"{path.name}: run python ci/pages.py"


READ = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.name != "spec.md")]
SOURCES = [
    path
    for folder in ("backends", "conformance", "reference")
    for path in (*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.j2"))
    if "tests" not in path.relative_to(ROOT).parts
]
MOST_WORDS = 9_650
"""Of README and pages, beside what is generated and the SPEC."""
PHRASES = (
    "a part: lacks | away, and pip | away, the journal | by rights | cases lack | comes out wrong | comes too late | "
    "innocent | is another one now | is no success | leave it away | leaves it away | may have the same origin | need "
    "not install the harness | nobody asked; certify | nothing that is here | of what is not | of which it says "
    "nothing | says nothing of this one | stands in spec | stronger the colour | that is none | the house | the "
    "simplest of | told | trusted with what | turns it round | wants more memory | what is not listed | what it is, "
    "it raised | what the libraries did | which is none | who is to mend | whom a verdict | without a way back"
)
"""Each has a plainer form: say who does what, by the field's term, without a double negation."""
JOINED = re.compile(r"""["']\s+f?["']""")


def reading(path: Path) -> Iterator[str]:
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        yield re.sub(r"<!-- ([\w:-]+):begin -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL)
        return
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = (node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    yield from (str(node.value) for node in texts if id(node) not in docstrings)


def test_pages_have_few_words_and_none_and_no_message_holds_one_of_these_phrases() -> None:
    assert sum(len(" ".join(reading(page)).split()) for page in READ) <= MOST_WORDS
    phrases = re.compile("|".join(map(re.escape, PHRASES.split(" | "))))
    # Only what holds a phrase anywhere, literals joined, is parsed, which takes ten times as long.
    joined = {path: " ".join(JOINED.sub("", path.read_text("utf-8")).lower().split()) for path in (*READ, *SOURCES)}
    held = [path for path, text in joined.items() if phrases.search(text)]
    texts = {path: " ".join(" ".join(reading(path)).lower().split()) for path in held}
    assert [(path.name, found[0]) for path, text in texts.items() if (found := phrases.search(text))] == []


SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]
BUILD = "from setuptools.build_meta import build_{0}; print(build_{0}('.'))"
APACHE = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of https://www.apache.org/licenses/LICENSE-2.0.txt."""


def shipped_files() -> Iterator[tuple[str, Path]]:
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT / folder)
            if path.is_file() and not {"tests", "__pycache__"} & set(inside.parts):
                yield package, inside


def run(command: list[str], folder: Path, **variables: str) -> str:
    environment = {**os.environ, **variables}
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def wheel(once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """A wheel built from an sdist, and that from a copy: setuptools would ship what an earlier build left here."""

    def build(folder: Path) -> None:
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, folder / name)
        for name in FOLDERS.values():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        run([sys.executable, "-c", BUILD.format("sdist")], folder)
        (sdist,) = folder.glob("*.tar.gz")
        shutil.unpack_archive(sdist, folder)
        run([sys.executable, "-c", BUILD.format("wheel")], folder / sdist.name.removesuffix(".tar.gz"))

    (built,) = once("wheel", build).glob("*/*.whl")
    return built


def test_the_wheel_holds_every_file_of_listed_packages_and_no_other(wheel: Path) -> None:
    expected = {f"{package.replace('.', '/')}/{path.as_posix()}" for package, path in shipped_files()}
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert sorted(packed) == sorted(expected)
    found = {".".join([package, *path.parts[:-1]]) for package, path in shipped_files() if path.name == "__init__.py"}
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(FOLDERS.values())


def test_the_wheel_tells_its_licence_and_its_description_and_a_citation_names_it(wheel: Path) -> None:
    with ZipFile(wheel) as packed:
        about = f"mla_conformance-{__version__}.dist-info"
        reported = Parser().parsestr(packed.read(f"{about}/METADATA").decode())
        assert (reported["License-Expression"], reported["License-File"]) == ("Apache-2.0", "LICENSE")
        assert hashlib.sha256(packed.read(f"{about}/licenses/LICENSE")).hexdigest() == APACHE
    assert reported["Description-Content-Type"] == "text/markdown"
    assert reported.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"], cited["cff-version"]) == (__version__, "Apache-2.0", "1.2.0")


def test_the_suite_runs_from_the_wheel_in_another_folder(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    ZipFile(wheel).extractall(site)
    selected = ["--backend", "TORCH_SDPA", "--mla-capability", "lse", "--mla-tier", "smoke", "--mla-device", "cpu"]
    suite = [sys.executable, "-m", "pytest", "--trace-config", "--pyargs", "mla_conformance.suite", *selected]
    passed = f"{len(find_capability('lse').select(Tier.SMOKE))} passed"
    printed = run(suite, elsewhere, PYTHONPATH=str(site))
    assert f"{site}/mla_conformance/plugin.py" in printed and passed in printed
