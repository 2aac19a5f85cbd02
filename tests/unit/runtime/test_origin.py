"""Engines with a required origin: pins, signatures, and refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from engine_directory import write_engine

from specbuild.builder.durable import staged_name
from specbuild.builder.engine.signing import sign_engine
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import check_sizes, read_manifest
from specbuild.runtime.engine_dir.manifest import SIGNATURE_FILE
from specbuild.runtime.engine_dir.origin import Origin
from specbuild.runtime.errors import EngineFileError, SpecbuildError
from specbuild.runtime.settings import RuntimeSettings

PEM = serialization.Encoding.PEM
Write = Callable[[Path], object]


def write_private(path: Path, key: object, password: bytes | None = None) -> Path:
    hidden = (
        serialization.NoEncryption()
        if password is None
        else serialization.BestAvailableEncryption(password)
    )
    path.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, hidden))
    return path


def write_public(path: Path, key: object) -> Path:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(key.public_key().public_bytes(PEM, form))
    return path


class Signed:
    """An engine, its keys, and the keys of another."""

    def __init__(self, folder: Path) -> None:
        self.engine = folder / "engine"
        write_engine(self.engine)
        self.key = ed25519.Ed25519PrivateKey.generate()
        self.private = write_private(folder / "key.pem", self.key)
        self.public = write_public(folder / "key.pub.pem", self.key)
        other = ed25519.Ed25519PrivateKey.generate()
        self.other_public = write_public(folder / "other.pub.pem", other)
        sign_engine(self.engine, self.private)
        self.digest = (self.engine / "manifest.sha256").read_text()[:64]


@pytest.fixture
def signed(tmp_path: Path) -> Signed:
    return Signed(tmp_path)


def test_a_signed_engine_loads_by_key_and_by_pin(signed: Signed) -> None:
    manifest = read_manifest(signed.engine)
    check_sizes(signed.engine, manifest)
    signature = (signed.engine / SIGNATURE_FILE).read_bytes()
    signed.key.public_key().verify(signature, (signed.engine / "manifest.sha256").read_bytes())
    for asked in (
        {},
        {"verify_key": signed.public},
        {"verify_key": str(signed.public), "pin": signed.digest},
        {"pin": signed.digest.upper()},
    ):
        assert Engine.load(signed.engine, RuntimeSettings(**asked)).manifest == manifest


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda engine: (engine / SIGNATURE_FILE).unlink(),
        lambda engine: flip(engine / SIGNATURE_FILE),
        lambda engine: (engine / SIGNATURE_FILE).write_bytes(b""),
        lambda engine: (engine / SIGNATURE_FILE).write_bytes(bytes(65)),
        lambda engine: flip(engine / "manifest.json"),
        lambda engine: flip(engine / "weights.safetensors"),
    ],
)
def test_rejects_changes_after_signing(signed: Signed, change: Write) -> None:
    change(signed.engine)
    with pytest.raises(EngineFileError) as refused:
        Engine.load(signed.engine, RuntimeSettings(verify_key=signed.public))
    assert "\n" not in str(refused.value)


def test_a_signing_that_was_killed_leaves_an_engine(signed: Signed) -> None:
    (signed.engine / staged_name(SIGNATURE_FILE)).write_bytes(b"half")
    Engine.load(signed.engine, RuntimeSettings(verify_key=signed.public))


def test_rejects_a_rebuilt_engine_with_the_old_signature(signed: Signed) -> None:
    """Every digest agrees, so only the signature or the pin shows the difference."""
    write_other = signed.engine.with_name("other")
    write_engine(write_other, seed=1)
    (signed.engine / SIGNATURE_FILE).rename(write_other / SIGNATURE_FILE)
    Engine.load(write_other)
    with pytest.raises(EngineFileError, match="is no signature of"):
        Engine.load(write_other, RuntimeSettings(verify_key=signed.public))
    with pytest.raises(EngineFileError, match="not the engine that is pinned"):
        Engine.load(write_other, RuntimeSettings(pin=signed.digest))


def test_rejects_another_key(signed: Signed) -> None:
    with pytest.raises(EngineFileError, match=r"by the key of .*other\.pub\.pem"):
        read_manifest(signed.engine, Origin(verify_key=signed.other_public))


@pytest.mark.parametrize("pin", ["", "abc", "z" * 64, "0" * 63])
def test_rejects_an_invalid_pin(signed: Signed, pin: str) -> None:
    with pytest.raises(SpecbuildError, match="is no SHA-256; give the 64 digits"):
        read_manifest(signed.engine, Origin(pin=pin))


def test_rejects_invalid_keys(signed: Signed, tmp_path: Path) -> None:
    curve = ec.generate_private_key(ec.SECP256R1())
    text = tmp_path / "text"
    text.write_text("no key")
    locked = write_private(tmp_path / "locked.pem", signed.key, b"secret")
    for file in (text, locked, signed.public, write_private(tmp_path / "ec.pem", curve)):
        with pytest.raises(SpecbuildError, match=r"is no Ed25519 private key .*openssl genpkey"):
            sign_engine(signed.engine, file)
    for file in (text, signed.private, write_public(tmp_path / "ec.pub.pem", curve)):
        with pytest.raises(SpecbuildError, match=r"is no Ed25519 public key .*openssl pkey"):
            read_manifest(signed.engine, Origin(verify_key=file))
    for file in (tmp_path / "none", tmp_path):
        with pytest.raises(SpecbuildError, match="cannot be read"):
            read_manifest(signed.engine, Origin(verify_key=file))


def test_a_damaged_engine_is_not_signed(signed: Signed) -> None:
    flip(signed.engine / "weights.safetensors")
    with pytest.raises(EngineFileError, match="damaged"):
        sign_engine(signed.engine, signed.private)


def test_reports_the_missing_package_to_install(
    signed: Signed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    Engine.load(signed.engine, RuntimeSettings(pin=signed.digest))
    with pytest.raises(SpecbuildError, match=r"pip install '\.\[sign\]'"):
        Engine.load(signed.engine, RuntimeSettings(verify_key=signed.public))
