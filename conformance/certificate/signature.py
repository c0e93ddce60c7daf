"""Signatures of certificates, made and checked by ``ssh-keygen``; the cryptography is OpenSSH's alone."""

import shutil
import subprocess
from pathlib import Path

from mla_conformance.files.inputs import InputError
from mla_conformance.files.outputs import write_output

NAMESPACE = "mla-conformance"
"""What a signature is for; one that the same key made for something else does not count."""
_SUFFIX = ".sig"


class SignatureError(Exception):
    """A file that nobody signed who is allowed to; the message says why."""


def signature_of(path: Path) -> Path:
    """Where the signature of a file lies."""
    return path.with_name(path.name + _SUFFIX)


def require_key(key: Path) -> None:
    """Check before a long run that its outcome can be signed.

    Raises:
        InputError: there is no ssh-keygen, or no such key.
    """
    _require_program()
    if not key.is_file():
        raise InputError(f"--sign {key}: expected the file of an SSH key")


def sign(path: Path, key: Path) -> Path:
    """Sign a file with an SSH key; the file of the signature, which lies beside.

    Raises:
        InputError: there is no ssh-keygen, or it refuses the key.
    """
    done = _keygen("sign", path, "-f", str(key), "-n", NAMESPACE)
    if done.returncode:
        raise InputError(f"--sign {key}: ssh-keygen refuses it: {_said(done)}")
    write_output(signature_of(path), done.stdout)
    return signature_of(path)


def signer_of(path: Path, signers: Path) -> str:
    """Who signed a file, of those whom a file of allowed signers names.

    Raises:
        InputError: there is no ssh-keygen, or no file of signers.
        SignatureError: it is not signed, or by nobody of them, or another content was.
    """
    signature = signature_of(path)
    if not signers.is_file():
        raise InputError(f"--signers {signers}: expected a file of allowed signers, as ssh-keygen(1) describes it")
    if not signature.is_file():
        raise SignatureError(f"it is not signed: there is no {signature.name} beside it")
    known = ("-f", str(signers), "-s", str(signature))
    found = _keygen("find-principals", path, *known)
    if found.returncode:
        raise SignatureError(f"{signature.name} is of none of the signers of {signers}: {_said(found)}")
    signer = found.stdout.splitlines()[0]
    checked = _keygen("verify", path, *known, "-I", signer, "-n", NAMESPACE)
    if checked.returncode:
        raise SignatureError(f"{signature.name} is no signature of {signer} under this content: {_said(checked)}")
    return signer


def _require_program() -> None:
    if shutil.which("ssh-keygen") is None:
        raise InputError("signatures are made and checked by ssh-keygen, which is not here: install OpenSSH's client")


def _keygen(action: str, path: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    _require_program()
    command = ["ssh-keygen", "-Y", action, *options]
    return subprocess.run(
        command, input=path.read_text(encoding="utf-8"), capture_output=True, encoding="utf-8", check=False
    )


def _said(done: "subprocess.CompletedProcess[str]") -> str:
    return " ".join((done.stderr or done.stdout).split())
