"""``specbuild cache``: the engines that commands built from checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from specbuild.cli.options.shared import Debug, Json
from specbuild.cli.terminal.help_page import Command, show_help_alone

cache = typer.Typer(
    help="List and remove the engines that commands built from checkpoints.",
    invoke_without_command=True,
)


@cache.callback()
def _cache(context: typer.Context) -> None:
    """List and remove the engines that commands built from checkpoints."""
    show_help_alone(context)


@cache.command("list", cls=Command)
def list_engines(as_json: Json = False, _debug: Debug = False) -> None:
    """List the engines that run, serve and chat built, most recently used first.

    They are in SPECBUILD_CACHE_DIR (default ~/.cache/specbuild). Only
    [b]specbuild cache rm[/b] removes them. Downloaded models are in the cache of
    Hugging Face: [b]hf cache ls[/b] lists them.

    \b
    Examples:
    specbuild cache list
    specbuild cache list --json
    """
    from specbuild.cli.model.engine_cache import EngineCache
    from specbuild.cli.tables.engine_list import engine_list
    from specbuild.cli.terminal.console import json_line, output, size_text

    store = EngineCache.of_user()
    engines = store.engines()
    if as_json:
        for engine in engines:
            print(json_line(engine))
        return
    if not engines:
        output().print(f"{store.folder} holds no engines", soft_wrap=True)
        return
    output().print(engine_list(engines))
    total = size_text(sum(engine.size_bytes for engine in engines))
    output().print(f"{total} in {store.folder}", soft_wrap=True)


@cache.command("rm", cls=Command)
def remove_engines(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ENGINE", help="Id of an engine, or a model to remove all its engines."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all engines.")] = False,
    _debug: Debug = False,
) -> None:
    """Remove engines from the cache; the next use of a model builds its engine again.

    \b
    Examples:
    specbuild cache rm --all
    """
    from specbuild.cli.model.engine_cache import EngineCache
    from specbuild.cli.terminal.console import messages, size_text
    from specbuild.runtime.errors import SpecbuildError

    if everything == bool(names):
        raise SpecbuildError("give ids of engines ('specbuild cache list' shows them), or --all")
    store = EngineCache.of_user()
    engines = store.engines()
    for name in names or ():
        if not any(engine.is_named(name) for engine in engines):
            raise SpecbuildError(
                f"the cache has no engine {name}: 'specbuild cache list' shows what it has"
            )
    for engine in engines:
        if everything or any(engine.is_named(name) for name in names or ()):
            store.remove(engine.name)
            size = size_text(engine.size_bytes)
            messages().print(f"removed {engine.name} ({size})", soft_wrap=True)
