"""The origin of an engine: an expected digest, or a signature."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from specbuild.runtime.engine_dir.manifest import MANIFEST_HASH_FILE, SIGNATURE_FILE
from specbuild.runtime.engine_dir.regular_file import read_regular
from specbuild.runtime.errors import EngineFileError, SpecbuildError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

Key: TypeAlias = "Ed25519PrivateKey | Ed25519PublicKey"

SIGNATURE_BYTES = 64
_MAX_KEY_BYTES = 64 << 10
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Origin:
    """The expected origin of an engine; with None nothing is checked.

    ``verify_key`` is a file with an Ed25519 public key in PEM, ``pin`` the SHA-256 of the manifest
    in hexadecimal digits.
    """

    verify_key: Path | None = None
    pin: str | None = None

    def require(self, directory: Path, digest_line: str) -> None:
        """Raise EngineFileError if the engine of this ``manifest.sha256`` has another origin.

        Raises SpecbuildError if the key or the pin is invalid.
        """
        if self.pin is not None:
            self._require_pin(directory, digest_line[:64])
        if self.verify_key is not None:
            _require_signature(directory, digest_line.encode(), self.verify_key)

    def _require_pin(self, directory: Path, digest: str) -> None:
        pin = (self.pin or "").lower()
        if not _DIGEST.fullmatch(pin):
            raise SpecbuildError(
                f"the pin {self.pin!r} is no SHA-256; give the 64 digits that 'specbuild check' "
                "prints"
            )
        if pin != digest:
            raise EngineFileError(
                f"{directory} is not the engine that is pinned: its manifest is {digest}, not {pin}"
            )


def private_key(file: Path) -> Ed25519PrivateKey:
    """Return the public key. Raises SpecbuildError if the file has none."""
    return cast("Ed25519PrivateKey", _key(file, private=True))


def _require_signature(directory: Path, signed: bytes, key_file: Path) -> None:
    key = cast("Ed25519PublicKey", _key(key_file, private=False))
    from cryptography.exceptions import InvalidSignature

    try:
        signature = read_regular(directory, SIGNATURE_FILE, most_bytes=SIGNATURE_BYTES)
    except OSError as error:
        raise EngineFileError(
            f"{directory} has no signature that can be read ({SIGNATURE_FILE}: {error.strerror}); "
            "get the engine from who signs it, or sign it with 'specbuild sign'"
        ) from error
    try:
        key.verify(signature, signed)
    except InvalidSignature as error:
        raise EngineFileError(
            f"{directory}: {SIGNATURE_FILE} is no signature of {MANIFEST_HASH_FILE} by the key of "
            f"{key_file}; do not use this engine"
        ) from error


def _key(file: Path, *, private: bool) -> Key:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError as error:
        raise SpecbuildError(
            "signatures need the package cryptography; pip install '.[sign]'"
        ) from error
    kind = ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey
    what = f"Ed25519 {'private' if private else 'public'} key in PEM"
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_KEY_BYTES)
        if private:
            key: object = serialization.load_pem_private_key(data, password=None)
        else:
            key = serialization.load_pem_public_key(data)
    except OSError as error:
        raise SpecbuildError(f"{file} cannot be read ({error.strerror}); give an {what}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SpecbuildError(_no_key(file, what, private=private)) from error
    if not isinstance(key, kind):
        raise SpecbuildError(_no_key(file, what, private=private))
    return key


def _no_key(file: Path, what: str, *, private: bool) -> str:
    make = "genpkey -algorithm ed25519" if private else "pkey -in KEY -pubout"
    return f"{file} is no {what} without a password; make one with 'openssl {make} -out FILE'"
