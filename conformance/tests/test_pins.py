"""What a certificate is tied to: other code, another library or another build under the same name is told."""

import json
import os
import shutil
import subprocess
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from mla_conformance.backends.references import parse_reference
from mla_conformance.certificate.certificate import Certificate
from mla_conformance.certificate.pins import Pins, Remark, Weight, compare, compare_loaded, owned_by_wheels
from mla_conformance.certificate.verify import seal
from mla_conformance.driving.driver import IN_PROCESS
from mla_conformance.driving.loaded import loaded_libraries
from mla_conformance.engine.messages import Trace
from mla_conformance.engine.worker import Worker
from mla_conformance.files.installed import Installed, git_asked_before, installed, source_digests
from mla_conformance.files.places import file_digest, find_place, place_of
from mla_conformance.judging.record import NOTHING_TRACED, Traced
from mla_conformance.tests.test_handed_in import certificate as made

BACKEND = """
import ctypes
from pathlib import Path
from mla_conformance.backends.torch_sdpa import TorchSDPAPrefillBackend
ctypes.CDLL(str(Path(__file__).with_name("libkernel.so")))
class MyBackend(TorchSDPAPrefillBackend): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    smallest = min(loaded_libraries(), key=lambda path: Path(path).stat().st_size)
    shutil.copy(smallest, tmp_path / "libkernel.so")
    (tmp_path / "my_backend.py").write_text(BACKEND)
    return tmp_path


@pytest.fixture
def certificate(folder: Path) -> Path:
    backend = parse_reference(f"{folder / 'my_backend.py'}:MyBackend")
    library = folder / "libkernel.so"
    traced = Traced({}, {place_of(library, backend.file): file_digest(library)})
    told = {"backend": backend.name, "reference": backend.reference, "pins": Pins.of(backend, {}), "traced": traced}
    path = folder / "certificate.json"
    path.write_bytes(msgspec.json.encode(made(**told)))
    return path


SHARED = ("libkernel.so", "shared library", "")


@pytest.mark.parametrize(
    ("name", "kind", "again"), [*(("my_backend.py", "source", again) for again in ("", "--rerun=3")), SHARED]
)
def test_a_certificate_holds_for_no_other_code(certificate: Path, ours: Any, name: str, kind: str, again: str) -> None:
    changed = certificate.with_name(name)
    before = file_digest(changed)
    changed.write_bytes(changed.read_bytes() + b"\n")
    status, _, complaint = ours("verify", certificate, *again.split())
    said = f"{kind} {changed} was changed: the certificate says SHA-256 {before}, here it is {file_digest(changed)}"
    assert status == 1 and said in complaint


def test_a_worker_finds_the_library_that_a_backend_loads(folder: Path) -> None:
    reference = parse_reference(f"{folder / 'my_backend.py'}:MyBackend").reference
    answer = Worker(torch.device("cpu"), None, lambda event: None, IN_PROCESS).answer(Trace(reference, {}))
    traced = answer.found.traced
    assert traced and traced.libraries["./libkernel.so"] == file_digest(folder / "libkernel.so")


@pytest.mark.parametrize("suffix", [".py", ".zip"])
def test_a_module_that_was_seen_is_pinned(certificate: Path, tmp_path: Path, ours: Any, suffix: str) -> None:
    helper = tmp_path / "far" / f"helper{suffix}"
    helper.parent.mkdir()
    helper.write_text("def fix(result): return result\n")
    stated = msgspec.json.decode(certificate.read_bytes(), type=Certificate)
    loaded = {str(path): file_digest(path) for path in (certificate.with_name("my_backend.py"), helper)}
    pins = Pins.of(parse_reference(stated.reference), {}, loaded)
    assert pins.sources == {**stated.pins.sources, f"./far/helper{suffix}": file_digest(helper)}
    pinned = msgspec.structs.replace(stated, pins=pins)
    certificate.write_bytes(msgspec.json.encode(msgspec.structs.replace(pinned, seal=seal(pinned))))
    assert ours("verify", certificate)[0] == 0
    helper.write_text("def fix(result): return 3 * result\n")
    status, _, complaint = ours("verify", certificate)
    assert status == 1 and f"source {helper} was changed" in complaint
    helper.unlink()
    status, printed, _ = ours("verify", certificate)
    assert status == 0 and "not compared" in printed


def test_what_a_wheel_holds_is_pinned_by_it_and_what_was_altered_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module, added = wheel(tmp_path), tmp_path / "kernels" / "added.py"
    added.touch()
    digests = {str(path): file_digest(path) for path in (module, added)}
    assert owned_by_wheels(digests) == (["kernels"], {str(added): digests[str(added)]})
    assert owned_by_wheels({str(module): "ab"}) == ([], {str(module): "ab"})
    assert owned_by_wheels({torch.__file__: file_digest(Path(torch.__file__))}) == ([], {})
    found = installed("kernels")
    module.write_text("A = 3\n")
    altered = installed("kernels")
    assert found and not found.altered, "as its RECORD says"
    assert altered == msgspec.structs.replace(found, altered=("kernels/__init__.py",)), "of the same length"
    assert found.build == "py3-none-any"


def weights(found: "list[Remark]") -> list[Weight]:
    return [remark.weight for remark in found]


def test_another_build_of_a_package_inherits_nothing_and_an_adapter_that_judges_alike_counts() -> None:
    backend, pin = parse_reference("TORCH_SDPA"), installed("msgspec")
    assert pin is not None and pin.files and not pin.altered
    here = distribution("msgspec").version

    def found(version: str, changed: Installed | None) -> list[Remark]:
        pins = Pins(versions={"msgspec": version}, installed={"msgspec": changed} if changed else {})
        return [each for each in compare(pins, NOTHING_TRACED, backend) if "msgspec" in each.sentence]

    assert found(here, pin) == []
    assert weights(found("0.0.1", pin)) == [Weight.OTHER_BUILD]
    assert weights(found(here, msgspec.structs.replace(pin, build="cp99-none-any"))) == [Weight.OTHER_BUILD]
    (other,) = found(here, msgspec.structs.replace(pin, files="ab" * 32))
    assert other.weight is Weight.AGAINST and f"SHA-256 {'ab' * 32}, here it is {pin.files}" in other.sentence
    assert weights(found(here, None)) == [Weight.REPORTED]
    backend, name, gone = parse_reference("TORCH_SDPA"), "mla_conformance.backends.torch_sdpa", "mla_conformance.gone"

    def counted(sources: dict[str, str], alike: dict[str, list[str]]) -> int:
        found = compare(Pins(sources=sources), NOTHING_TRACED, backend, alike=alike)
        return sum(each.weight is Weight.AGAINST and "torch_sdpa" in each.sentence for each in found)

    pinned = Pins.of(backend, {}).sources
    here, earlier = pinned[name], {**pinned, name: "earlier"}
    for listed, against in (([], 1), (["earlier"], 1), ([here], 1), (["earlier", here], 0)):
        assert counted(earlier, {name: listed}) == against
    # It was joined with one that is gone: unless that is pinned, nothing says what the certificate is of.
    joined = {each: digest for each, digest in pinned.items() if each != name}
    for sources, against in ((joined, 1), ({**joined, gone: "other"}, 1), ({**joined, gone: "earlier"}, 0)):
        assert counted(sources, {name: [here], gone: ["earlier"]}) == against


def wheel(site: Path) -> Path:
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("A = 1\n")
    (site / "kernels-1.0.dist-info").mkdir()
    (site / "kernels-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 1.0\n")
    (site / "kernels-1.0.dist-info" / "WHEEL").write_text("Tag: py3-none-any\n")
    record = "kernels/__init__.py,sha256=Bu289DNhZaJx5lJAJaZDnDyqMkb9B5bxFncieXB6UyU,6\n../bin/run,sha256=x,1\n"
    (site / "kernels-1.0.dist-info" / "RECORD").write_text(record)
    return site / "kernels" / "__init__.py"


def test_a_checkout_is_known_by_its_commit_and_whether_it_is_clean(tmp_path: Path, monkeypatch: Any) -> None:
    module = wheel(tmp_path / "site")
    reported = json.dumps({"url": (tmp_path / "checkout").as_uri(), "dir_info": {"editable": True}})
    (tmp_path / "site" / "kernels-1.0.dist-info" / "direct_url.json").write_text(reported)
    shutil.move(module.parent, tmp_path / "checkout" / "kernels")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    folder = installed("kernels")
    assert folder and folder.files and not folder.commit
    identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run(["git", "-C", tmp_path / "checkout", *command], check=True, env={**os.environ, **identity})
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    subprocess.run(["git", "-C", tmp_path / "checkout", "config", "core.fsmonitor", program], check=True)
    checkout = installed("kernels")
    assert checkout and len(checkout.commit) == 40 and (checkout.clean, checkout.files) == (True, "")
    assert not (tmp_path / "ran").exists()
    with git_asked_before():
        monkeypatch.setattr(subprocess, "run", None)
        assert installed("kernels") == checkout
        (tmp_path / "checkout" / "kernels" / "__init__.py").write_text("A = 3\n")
        assert installed("kernels") == msgspec.structs.replace(checkout, clean=False)
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert installed("kernels") == msgspec.structs.replace(checkout, clean=False)


def test_sources_are_followed_through_what_no_wheel_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "site" / "packaged-1.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (own := tmp_path / "my_kernels").mkdir()
    (own / "__init__.py").write_text("import json, torch, no_such_module\n")
    (own / "tiles.py").write_text("from . import helper\nfrom mla_conformance.backends import eager\n")
    (own / "helper.py").write_text("import packaged_kernels\n")
    (tmp_path / "site" / "packaged_kernels.py").write_text("raise SystemExit\n")
    (tmp_path / "mine.py").write_text("def late():\n    from my_kernels.tiles import run\n")
    names = set(source_digests([str(tmp_path / "mine.py")]))
    followed = {name for name in names if not name.startswith("mla_conformance.")}
    assert followed == {"mine.py", "my_kernels", "my_kernels.tiles", "my_kernels.helper"}
    assert "mla_conformance.backends.metadata" in names


def test_a_file_is_found_by_its_name_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, home, backend = tmp_path / "site", tmp_path / "home", tmp_path / "work" / "mine.py"
    (site / "flash-1.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("HOME", str(home))
    places = {
        site / "flash" / "_C.so": "flash/_C.so",
        backend.parent / "lib" / "k.so": "./lib/k.so",
        home / ".cache" / "jit" / "k.so": "~/.cache/jit/k.so",
        tmp_path / "other" / "k.so": str(tmp_path / "other" / "k.so"),
    }
    for path, name in places.items():
        assert place_of(path, backend) == name and find_place(name, backend) is None
        path.parent.mkdir(parents=True)
        path.touch()
        assert find_place(name, backend) == path or find_place(name, backend).samefile(path)  # type: ignore[union-attr]
    assert find_place("x" * 5000) is None


def test_what_is_loaded_and_run_here_is_held_against_what_was() -> None:
    then = Traced({"lse": ("flash::fwd", "Memset")}, {"flash/_C.so": "1", "~/.cache/jit/k.so": "1"})
    assert list(compare_loaded(then, then)) == []
    libraries = {"flash/_C.so": "2", "~/.cache/jit/k.so": "2", "new.so": "3"}
    other = Traced({"lse": ("void at::native::softmax",)}, libraries)
    found = list(compare_loaded(then, other))
    assert weights(found) == [Weight.AGAINST, Weight.REPORTED, Weight.REPORTED, Weight.AGAINST]
    assert found[0].sentence == "loaded library flash/_C.so was changed: the certificate says SHA-256 1, here it is 2"
    assert found[-1].sentence == "kernels: none of those of the certificate ran here, but none but torch's own"


def test_a_certificate_holds_with_its_sources_and_a_backend_of_another_machine_is_not_compared(
    certificate: Path, ours: Any
) -> None:
    """Without the digest of the code that is here a certificate is of other code."""
    status, printed, _ = ours("verify", certificate)
    assert status == 0 and "MyBackend on cpu" in printed
    stated = msgspec.json.decode(issued := certificate.read_bytes(), type=Certificate)
    bare = msgspec.structs.replace(stated, pins=msgspec.structs.replace(stated.pins, sources={}))
    certificate.write_bytes(msgspec.json.encode(msgspec.structs.replace(bare, seal=seal(bare))))
    assert ours("verify", certificate)[0] == 1
    certificate.write_bytes(issued)
    elsewhere = certificate.parent / "elsewhere"
    elsewhere.mkdir()
    for name in ("my_backend.py", "libkernel.so"):
        certificate.with_name(name).rename(elsewhere / name)
    status, printed, _ = ours("verify", certificate)
    assert status == 0 and "the backend was not compared: " in printed
    status, printed, _ = ours("verify", certificate, "--backend", f"{elsewhere / 'my_backend.py'}:MyBackend")
    assert status == 0 and "not compared" not in printed
    assert ours("verify", certificate, "--backend", "TORCH_SDPA")[0] == 2
