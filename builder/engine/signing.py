"""Signs an engine, so that its integrity can be verified with the public key."""

from __future__ import annotations

from pathlib import Path

from specbuild.builder.durable import replace_bytes
from specbuild.runtime.engine_dir.files import manifest_digest_of, read_manifest, verify_files
from specbuild.runtime.engine_dir.manifest import SIGNATURE_FILE
from specbuild.runtime.engine_dir.origin import private_key
from specbuild.runtime.errors import SpecbuildError


def sign_engine(engine: Path, key_file: Path) -> None:
    """Check every file, and write the signature of ``manifest.sha256``.

    ``key_file`` has an Ed25519 private key in PEM. Raises EngineFileError if the engine is damaged,
    SpecbuildError if there is no key or the engine cannot be written to.
    """
    key = private_key(key_file)
    manifest = read_manifest(engine)
    verify_files(engine, manifest)
    signature = key.sign(manifest_digest_of(engine).encode())
    try:
        replace_bytes(engine / SIGNATURE_FILE, signature)
    except OSError as error:
        raise SpecbuildError(
            f"{engine / SIGNATURE_FILE} cannot be written ({error.strerror})"
        ) from error
