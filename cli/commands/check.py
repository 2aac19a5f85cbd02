"""``specbuild check``: check an engine's files and whether this machine can run it."""

from __future__ import annotations

import typer

from specbuild.cli.options.shared import Debug, EngineDirectory, Pin, VerifyKey

EXIT_NOT_HERE = 1


def check(
    engine: EngineDirectory,
    verify_key: VerifyKey = None,
    pin: Pin = None,
    _debug: Debug = False,
) -> None:
    """Check whether an engine is complete and can run on this machine.

    For CUDA engines this checks the GPU's architecture, the driver version, and
    the memory for weights and caches; for engines of several GPUs also that these
    are alike and read each other's memory. For TensorRT engines it checks the
    version of the library and the GPU. The engine is not loaded;
    [b]selftest[/b] loads it and checks its output.

    The command compares the files and their sizes with the manifest. Checksums are
    verified when an engine is loaded. The last line is the manifest's SHA-256, the
    value for [b]--pin[/b]. Exit code 0: the engine can run here. 1: it is complete but
    cannot run here, with the reasons. 2: not an engine, or damaged.

    \b
    Examples:
    specbuild check engine
    """
    from specbuild.cli.terminal.console import say
    from specbuild.runtime.engine_dir.files import check_sizes, manifest_digest_of, read_manifest
    from specbuild.runtime.engine_dir.origin import Origin
    from specbuild.runtime.engine_dir.ranks import unmeasured
    from specbuild.runtime.executors.registry import check_here

    manifest = read_manifest(engine, Origin(verify_key, pin))
    check_sizes(engine, manifest)
    reasons = check_here(manifest, engine)
    digest = f"manifest: {manifest_digest_of(engine)[:64]}"
    warned = unmeasured(manifest)
    if warned is not None:
        say(f"note: {warned}")
    if not reasons:
        say(f"{engine} can run on this machine")
        say(digest)
        return
    say(f"{engine} is complete, but cannot run on this machine:")
    for reason in reasons:
        say(f"- {reason}")
    say(digest)
    raise typer.Exit(EXIT_NOT_HERE)
