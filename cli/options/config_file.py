"""``--config FILE``: options of a command from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbuild.builder.speculative_config import EngineConfig, SpeculativeConfig
from specbuild.builder.yaml_file import require_known
from specbuild.cli.options.shared import GENERAL


def _apply(context: typer.Context, config: EngineConfig | None) -> EngineConfig | None:
    """What the file gives stands where the command line gives nothing."""
    if config is None:
        return None
    names = [option.name for option in context.command.params]
    known = [name for name in names if name and not name.startswith("_") and name != "config"]
    command = context.command.name or ""
    require_known(config.written(command), known, config.where)
    given = config.of_command(command)
    repeatable = {o.name for o in context.command.params if getattr(o, "multiple", False)}
    context.default_map = {
        name: [value] if name in repeatable and isinstance(value, str | Path) else value
        for name, value in given.items()
        if name in known
    }
    return config


def speculation_in(config: EngineConfig | None) -> SpeculativeConfig:
    """What a file says of speculation; nothing without a file."""
    return SpeculativeConfig() if config is None else config.speculative_config


Config = Annotated[
    EngineConfig | None,
    typer.Option(
        "--config",
        metavar="FILE.yaml",
        help="Read options from a file; command-line options override it.",
        parser=EngineConfig.from_yaml,
        callback=_apply,
        is_eager=True,
        rich_help_panel=GENERAL,
    ),
]
