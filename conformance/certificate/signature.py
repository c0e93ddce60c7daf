"""Signatures of certificates, made and checked by ``ssh-keygen``; the cryptography is OpenSSH's alone."""

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mla_conformance.files.inputs import InputError, read_text

NAMESPACE = "mla-conformance"
"""What a signature is for; one that the same key made for something else does not count."""
_SUFFIX = ".sig"


class SignatureError(Exception):
    """A file that nobody signed who is allowed to; the message says why."""


def signature_of(path: Path) -> Path:
    """Where the signature of a file lies."""
    return path.with_name(path.name + _SUFFIX)


def require_key(key: Path) -> None:
    """Check before a long run that its outcome can be signed."""
    _require_program()
    if not key.is_file():
        raise InputError(f"--sign {key}: expected the file of an SSH key")


def sign(content: str, key: Path) -> str:
    """The signature of a text by an SSH key."""
    done = _keygen("sign", content, "-f", str(key), "-n", NAMESPACE)
    if done.returncode:
        raise InputError(f"--sign {key}: ssh-keygen refuses it: {_said(done)}")
    return done.stdout


@dataclass(frozen=True)
class Signed:
    """What a signature is of."""

    content: str  # a file's, or a record's seal where many records are in a file
    signature: str | None  # None if there is none
    name: str  # the signature's, in words

    @staticmethod
    def of(path: Path) -> "Signed":
        """A file, with the signature that lies beside it."""
        signature = signature_of(path)
        return Signed(read_text(path), read_text(signature) if signature.is_file() else None, signature.name)

    def signer(self, signers: Path) -> str:
        """Who signed it, of those whom a file of allowed signers names.

        Raises:
            InputError: there is no ssh-keygen, or no file of signers.
            SignatureError: it is not signed, or by nobody of them, or another content was.
        """
        if not signers.is_file():
            raise InputError(f"--signers {signers}: expected a file of allowed signers, as ssh-keygen(1) describes it")
        if self.signature is None:
            raise SignatureError(f"it is not signed: there is no {self.name} beside it")
        with tempfile.NamedTemporaryFile("w", suffix=_SUFFIX, encoding="utf-8") as file:
            file.write(self.signature)
            file.flush()
            known = ("-f", str(signers), "-s", file.name)
            found = _keygen("find-principals", self.content, *known)
            if found.returncode:
                raise SignatureError(f"{self.name} is of none of the signers of {signers}: {_said(found)}")
            signer = found.stdout.splitlines()[0]
            checked = _keygen("verify", self.content, *known, "-I", signer, "-n", NAMESPACE)
        if checked.returncode:
            raise SignatureError(f"{self.name} is no signature of {signer} under this content: {_said(checked)}")
        return signer


def _require_program() -> None:
    if shutil.which("ssh-keygen") is None:
        raise InputError("signatures are made and checked by ssh-keygen, which is not here: install OpenSSH's client")


def _keygen(action: str, content: str, *options: str) -> "subprocess.CompletedProcess[str]":
    _require_program()
    command = ["ssh-keygen", "-Y", action, *options]
    return subprocess.run(command, input=content, capture_output=True, encoding="utf-8", check=False)


def _said(done: "subprocess.CompletedProcess[str]") -> str:
    return " ".join((done.stderr or done.stdout).split())
