"""Signs an engine: whoever has the public key can tell that nothing of it was changed."""

from __future__ import annotations

from pathlib import Path

from specbuild.builder.durable import replace_bytes
from specbuild.runtime.engine_dir.files import manifest_digest_of, read_manifest, verify_files
from specbuild.runtime.engine_dir.manifest import SIGNATURE_FILE
from specbuild.runtime.engine_dir.origin import private_key
from specbuild.runtime.errors import SpecbuildError


def sign_engine(engine: Path, key_file: Path) -> None:
    """Checks every file, and writes the signature of ``manifest.sha256`` beside it.

    ``key_file`` holds an Ed25519 private key in PEM. Raises EngineFileError where the engine is
    damaged, SpecbuildError where there is no key or the engine cannot be written to.
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
