"""Signatures of certificates, made and checked by ``ssh-keygen``; the cryptography is OpenSSH's alone."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from mla_conformance.certificate.pins import Remark, Weight
from mla_conformance.files.whole import InputError

NAMESPACE = "mla-conformance"  # what a signature is for; one that the same key made for something else does not count
_SUFFIX = ".sig"


def signature_of(path: Path) -> Path:
    return path.with_name(path.name + _SUFFIX)


def require_key(key: Path) -> None:
    _require_program()
    if not key.is_file():
        raise InputError(f"--sign {key}: expected the file of an SSH key")


def sign(content: str, key: Path) -> str:
    refused, said = _keygen("sign", content, "-f", str(key), "-n", NAMESPACE)
    if refused:
        raise InputError(f"--sign {key}: ssh-keygen refuses it: {said}")
    return said


def checked(content: str, signature: str | None, name: str, signers: Path) -> Remark:
    """Who signed a file or a record's seal, of those whom a file names; nobody of them speaks against it."""
    if not signers.is_file():
        raise InputError(f"--signers {signers}: expected a file of allowed signers, as ssh-keygen(1) describes it")
    if signature is None:
        return Remark(Weight.AGAINST, f"it is not signed: there is no {name} beside it")
    with tempfile.NamedTemporaryFile("w", suffix=_SUFFIX, encoding="utf-8") as file:
        file.write(signature)
        file.flush()
        known = ("-f", str(signers), "-s", file.name)
        refused, said = _keygen("find-principals", content, *known)
        if refused:
            return Remark(Weight.AGAINST, f"{name} is of none of the signers of {signers}: {said}")
        signed_by = said.splitlines()[0]
        refused, said = _keygen("verify", content, *known, "-I", signed_by, "-n", NAMESPACE)
    if refused:
        return Remark(Weight.AGAINST, f"{name} is no signature of {signed_by} under this content: {said}")
    return Remark(Weight.REPORTED, f"signed by {signed_by}")


def _require_program() -> None:
    if shutil.which("ssh-keygen") is None:
        raise InputError("signatures are made and checked by ssh-keygen, which is not here: install OpenSSH's client")


def _keygen(action: str, content: str, *options: str) -> tuple[bool, str]:
    """Whether the program refuses, and why in one line, or else what it printed."""
    _require_program()
    command = ["ssh-keygen", "-Y", action, *options]
    done = subprocess.run(command, input=content, capture_output=True, encoding="utf-8", check=False)
    why = " ".join((done.stderr or done.stdout).split())
    return bool(done.returncode), why if done.returncode else done.stdout
