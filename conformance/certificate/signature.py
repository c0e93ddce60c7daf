"""Signatures of certificates, made and checked by ``ssh-keygen``; the cryptography is OpenSSH's alone."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from mla_conformance.files.whole import InputError

NAMESPACE = "mla-conformance"  # what a signature is for; one that the same key made for something else does not count
_SUFFIX = ".sig"


class SignatureError(Exception):
    """A file that nobody signed who is allowed to; the message says why."""


def signature_of(path: Path) -> Path:
    return path.with_name(path.name + _SUFFIX)


def require_key(key: Path) -> None:
    _require_program()
    if not key.is_file():
        raise InputError(f"--sign {key}: expected the file of an SSH key")


def sign(content: str, key: Path) -> str:
    done = _keygen("sign", content, "-f", str(key), "-n", NAMESPACE)
    if done.returncode:
        raise InputError(f"--sign {key}: ssh-keygen refuses it: {_said(done)}")
    return done.stdout


def signer(content: str, signature: str | None, name: str, signers: Path) -> str:
    """Who signed a file or a record's seal, of those whom a file names; SignatureError for nobody of them."""
    if not signers.is_file():
        raise InputError(f"--signers {signers}: expected a file of allowed signers, as ssh-keygen(1) describes it")
    if signature is None:
        raise SignatureError(f"it is not signed: there is no {name} beside it")
    with tempfile.NamedTemporaryFile("w", suffix=_SUFFIX, encoding="utf-8") as file:
        file.write(signature)
        file.flush()
        known = ("-f", str(signers), "-s", file.name)
        found = _keygen("find-principals", content, *known)
        if found.returncode:
            raise SignatureError(f"{name} is of none of the signers of {signers}: {_said(found)}")
        signed_by = found.stdout.splitlines()[0]
        checked = _keygen("verify", content, *known, "-I", signed_by, "-n", NAMESPACE)
    if checked.returncode:
        raise SignatureError(f"{name} is no signature of {signed_by} under this content: {_said(checked)}")
    return signed_by


def _require_program() -> None:
    if shutil.which("ssh-keygen") is None:
        raise InputError("signatures are made and checked by ssh-keygen, which is not here: install OpenSSH's client")


def _keygen(action: str, content: str, *options: str) -> "subprocess.CompletedProcess[str]":
    _require_program()
    command = ["ssh-keygen", "-Y", action, *options]
    return subprocess.run(command, input=content, capture_output=True, encoding="utf-8", check=False)


def _said(done: "subprocess.CompletedProcess[str]") -> str:
    return " ".join((done.stderr or done.stdout).split())
