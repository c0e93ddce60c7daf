"""Loading: what a user may write for a backend, and the sentence for everything that is not one."""

import signal
import subprocess
import sys
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.backends import kernel, references, registry
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.loading import load_backend, load_role, roles_of, unavailable_reasons
from mla_conformance.backends.references import BackendReference, BackendReferenceError, known_backends, parse_reference
from mla_conformance.backends.roles import ROLES, Role

IMPORT = "from mla_conformance.backends.eager import EagerPrefillBackend\n"
DECODE = "from mla_conformance.backends.eager_decode import EagerDecodeBackend\n"

MINE, DECODES = IMPORT + "class Mine(EagerPrefillBackend): ", DECODE + "class Mine(EagerDecodeBackend): "
ABSTRACT = "from mla_conformance.backends.interface import MLAPrefillBackend\nclass Mine(MLAPrefillBackend): ..."
OTHERS = """from mla_conformance.backends.generations.{} import MLAPrefillBackend
class Mine(MLAPrefillBackend):
    def run_prefill_context_chunk(self, chunk, q, k, v, out=None): ...
"""


def written(folder: Path, source: str) -> str:
    (folder / "mine.py").write_text(source)
    return str(folder / "mine.py")


@pytest.fixture
def plugged_in(installed: Any, monkeypatch: Any) -> Any:
    point = EntryPoint("THEIRS", "theirs:Backend", "mla_conformance.backends")
    monkeypatch.setattr(references, "entry_points", lambda group: [point])
    return partial(installed, "theirs")


def test_a_name_stands_for_a_class_in_each_role() -> None:
    eager, ragged, latent = map(parse_reference, ("EAGER", "FLASH_ATTN[fa3]", "FLASHMLA"))
    assert {"EAGER", "TORCH_SDPA", "FLASH_ATTN", "CUSTOM"} - {each.name for each in known_backends()} == {"CUSTOM"}
    assert roles_of(eager) == tuple(role for role in ROLES.values() if role is not Role.LAYER)
    assert (roles_of(ragged), roles_of(latent)) == ((Role.PREFILL,), (Role.DECODE,))
    assert load_backend(eager) is load_role(eager, Role.PREFILL) is EagerPrefillBackend
    assert load_role(ragged, Role.DECODE) is None and load_role(eager, Role.DECODE).get_name() == "EAGER"
    with pytest.raises(BackendReferenceError, match=r"'NOPE'; expected one of EAGER, TORCH_SDPA, .*file\.py:Class"):
        parse_reference("NOPE")


ALONE = """
import sys
from mla_conformance.backends import loading, references, roles
loading.load_role(references.parse_reference("EAGER"), roles.Role.DECODE)
print(*sorted(name.removeprefix("mla_conformance.backends.") for name in sys.modules if "backends." in name))
loading.load_adapters()
"""


def test_a_kernel_is_imported_without_what_other_roles_and_interfaces_need() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, timeout=120)
    found = set(done.stdout.split())
    assert {"decode", "eager_decode", "online_softmax"} <= found
    assert not found.intersection(ROLES) - {"decode"} and not [each for each in found if "generations" in each]


def test_a_class_is_loaded_from_a_module_or_any_file_and_has_the_role_of_its_methods(
    tmp_path: Path, monkeypatch: Any
) -> None:
    backend = parse_reference("mla_conformance.backends.eager:EagerPrefillBackend")
    assert (backend.name, load_backend(backend)) == ("EagerPrefillBackend", EagerPrefillBackend)
    loaded = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        written(folder, IMPORT + f"class Mine(EagerPrefillBackend): home = {folder.name!r}\n")
        monkeypatch.chdir(folder)
        loaded.append(parse_reference("mine.py:Mine"))
    monkeypatch.chdir("/")
    assert [each.reference for each in loaded] == [f"{tmp_path / name / 'mine.py'}:Mine" for name in "ab"]
    assert [load_backend(each).home for each in loaded] == ["a", "b"]
    assert load_backend(loaded[0]) is load_backend(loaded[0])
    with pytest.raises(BackendReferenceError, match=r"no file .*gone\.py"):
        parse_reference(f"{tmp_path / 'gone.py'}:Mine")
    alone = parse_reference(f"{written(tmp_path, DECODE + 'class Mine(EagerDecodeBackend): ...')}:Mine")
    assert roles_of(alone) == (Role.DECODE,) and load_backend(alone) is load_role(alone, Role.DECODE)
    (tmp_path / "both").mkdir()
    source = "class Mine(EagerDecodeBackend): prefill_backend, sparse_backend = EagerPrefillBackend, 3\n"
    both = parse_reference(f"{written(tmp_path / 'both', IMPORT + DECODE + source)}:Mine")
    assert roles_of(both)[:2] == (Role.PREFILL, Role.DECODE)
    assert load_role(both, Role.PREFILL) is EagerPrefillBackend and load_backend(both).__name__ == "Mine"
    with pytest.raises(BackendReferenceError, match="expected a class, got int"):
        load_role(both, Role.SPARSE)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_library", "does not import: ModuleNotFoundError: No module named 'no_such_library'"),
        ("def broken(:", "does not import: SyntaxError"),
        ("other = 1", "no class Mine in .*mine.py"),
        ("Mine = 3", "expected a class, got int"),
        ("class Mine:\n    def run_decode(self): ...\n", "Mine lacks get_name, is_available, prepare_metadata, supp"),
        (MINE + "supported_dtypes = []", "Mine.supported_dtypes: expected torch dtypes, got none, so that nothing is"),
        (MINE + "supported_dtypes = ['bfloat16']", "torch dtypes, got 'bfloat16'"),
        (MINE + "prepare_metadata = None", "class Mine lacks prepare_metadata$"),
        (MINE + "declaration = {'emulated': True}", "must be a Declaration, got dict"),
        (DECODES + "supported_kv_cache_dtypes = ['fp9']", "expected some of auto, fp8, fp8_ds_mla, .*, got 'fp9'"),
        (DECODES + "supported_query_len = 0", "a positive number or None, got 0"),
        (DECODES + "supported_query_len = 1", "supports_nonuniform_queries: expected False where .* is 1, got True"),
        (ABSTRACT, "class Mine lacks get_name, run_prefill_context_chunk, run_prefill_new_tokens"),
        (OTHERS.format("present"), "lacks get_name, run_prefill_new_tokens"),
        (OTHERS.format("earlier") + "    def get_prefill_impl_cls(): ...\n", "lacks get_name$"),
    ],
)
def test_a_file_without_a_backend_says_why(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(BackendReferenceError, match=said):
        load_backend(parse_reference(f"{written(tmp_path, source)}:Mine"))


def test_a_module_without_a_backend_says_why_and_a_file_is_read_again(tmp_path: Path) -> None:
    for name in ("no_such_module:Mine", "mla_conformance.backends.eager:Nope", ":Mine", "a..b:C"):
        with pytest.raises(BackendReferenceError, match=r"does not import|no class"):
            load_backend(parse_reference(name))
    reference = f"{written(tmp_path, 'import no_such_library')}:Mine"
    with pytest.raises(BackendReferenceError):
        load_backend(parse_reference(reference))
    written(tmp_path, IMPORT + "class Mine(EagerPrefillBackend): ...\n\n")
    assert load_backend(parse_reference(reference)).get_name() == "EAGER"


def test_an_entry_point_is_a_backend_and_what_is_broken_missing_or_not_served_is_a_reason(plugged_in: Any) -> None:
    def lacks_a_library(name: str) -> None:
        raise OSError("libcuda.so.1")

    plugged_in(Backend=EagerPrefillBackend)
    assert BackendReference("THEIRS", "THEIRS") in known_backends()
    assert load_backend(parse_reference("THEIRS")) is EagerPrefillBackend
    broken = "entry point THEIRS = theirs:Backend does not import:"
    lacks = "'THEIRS': class object lacks get_name, is_available, prepare_metadata, run_prefill_context_chunk, "
    for contents, said in (
        ({}, f"{broken} AttributeError: module 'theirs' has no attribute 'Backend'"),
        ({"__getattr__": lacks_a_library}, f"{broken} OSError: libcuda.so.1"),
        ({"Backend": object}, lacks),
    ):
        plugged_in(**contents)
        (reason,) = unavailable_reasons(parse_reference("THEIRS"), None)
        assert reason.startswith(said)
    assert unavailable_reasons(parse_reference("EAGER"), None) == []
    (reason,) = unavailable_reasons(parse_reference("TORCH_SDPA"), kernel.DeviceCapability(9, 0), Role.PREFILL)
    assert reason == "compute capability not supported: this device has 9.0"
    lacking = {"missing_dependencies": classmethod(lambda cls: ["install x"])}
    plugged_in(Backend=type("Mine", (EagerPrefillBackend,), lacking))
    assert unavailable_reasons(parse_reference("THEIRS"), None) == ["install x"]


RAISED = {"raise SystemExit(3)": "SystemExit: 3", "raise OSError('two\\nlines')": "OSError: two lines"}
RAISED |= {"raise KeyboardInterrupt": "KeyboardInterrupt", "def f(): f()\nf()": "RecursionError: maximum recursion"}


@pytest.mark.parametrize(("body", "raised"), RAISED.items())
def test_whatever_a_module_raises_is_one_line(tmp_path: Path, monkeypatch: Any, body: str, raised: str) -> None:
    path = written(tmp_path, body)
    with pytest.raises(BackendReferenceError) as caught:
        unavailable_reasons(parse_reference(f"{path}:Mine"), None)
    assert str(caught.value).startswith(f"'{path}:Mine' does not import: {raised}")
    monkeypatch.syspath_prepend(tmp_path)
    registry.register_mla_prefill_backend(registry.MLAPrefillBackendEnum.CUSTOM, "mine.Mine")
    try:
        (reason,) = unavailable_reasons(BackendReference("CUSTOM", "CUSTOM"), None)
    finally:
        registry.MLAPrefillBackendEnum.CUSTOM.clear_override()
    assert reason.startswith(raised) and "\n" not in reason


def test_an_interrupt_of_the_user_is_no_fault_of_the_backend(tmp_path: Path) -> None:
    # They may be ignored here, as in what a script has started in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    path = written(tmp_path, "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)\n")
    with pytest.raises(KeyboardInterrupt):
        unavailable_reasons(parse_reference(f"{path}:Mine"), None)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("is_available", "1 / 0", "it raised ZeroDivisionError: division by zero"),
        ("supports_compute_capability", "sys.exit(1)", "it raised SystemExit: 1"),
        ("is_available", "None", "is_available returned None, expected True or False"),
        ("supports_compute_capability", "'9.0'", "supports_compute_capability returned '9.0', expected True or False"),
        ("broken_dependencies", "'gone'", "broken_dependencies returned 'gone', expected a list of reasons (strings)"),
    ],
)
def test_who_cannot_say_whether_it_can_run_is_unavailable(tmp_path: Path, method: str, answer: str, said: str) -> None:
    source = f"import sys\n{IMPORT}class Mine(EagerPrefillBackend):\n    {method} = lambda *_: {answer}\n"
    (reason,) = unavailable_reasons(parse_reference(f"{written(tmp_path, source)}:Mine"), None)
    assert reason.startswith(f"asked whether it can run here, {said}")
