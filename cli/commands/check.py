"""``specbuild check``: is this an engine, and does it run here?"""

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
    """Say whether an engine is whole and runs on this machine, without loading its weights.

    For a CUDA engine: is there a GPU of the architecture that it was built for, a
    driver that is new enough, and memory for its weights and caches? For TensorRT
    engines: is the library installed, of the version that built them, and the
    GPU one of theirs? They are not loaded.

    Reads the manifest and the sizes of the files, and prints the manifest's
    SHA-256, which [b]--pin[/b] takes. Exit code 0: runs here;
    1: sound, but not here, for each reason printed; 2: not an engine, or damaged.

    \b
    Examples:
    specbuild check engine
    """
    from specbuild.cli.terminal.console import say
    from specbuild.runtime.engine_dir.files import check_sizes, manifest_digest_of, read_manifest
    from specbuild.runtime.engine_dir.origin import Origin
    from specbuild.runtime.executors.registry import check_here

    manifest = read_manifest(engine, Origin(verify_key, pin))
    check_sizes(engine, manifest)
    reasons = check_here(manifest, engine)
    digest = f"manifest: {manifest_digest_of(engine)[:64]}"
    if not reasons:
        say(f"{engine} runs here")
        say(digest)
        return
    say(f"{engine} is sound, but does not run here:")
    for reason in reasons:
        say(f"- {reason}")
    say(digest)
    raise typer.Exit(EXIT_NOT_HERE)
