"""``specbuild sign``: sign an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbuild.cli.options.shared import Debug, EngineDirectory


def sign(
    engine: EngineDirectory,
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="Ed25519 private key (PEM).")],
    _debug: Debug = False,
) -> None:
    """Sign an engine, so that others can verify its origin and integrity.

    All files are checked first. manifest.sig is the signature of manifest.sha256.
    Distribute the public key: [b]check[/b] and [b]run[/b] accept it as [b]--verify-key[/b].

    \b
    Examples:
    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out key.pub.pem
    specbuild sign engine --key key.pem
    """
    from specbuild.builder.engine.signing import sign_engine
    from specbuild.cli.terminal.console import say
    from specbuild.runtime.engine_dir.manifest import SIGNATURE_FILE

    sign_engine(engine, key)
    say(f"{engine / SIGNATURE_FILE} signs the engine")
