"""``--config FILE``: options of a command from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbuild.builder.speculative_config import EngineConfig, SpeculativeConfig
from specbuild.builder.yaml_file import require_known
from specbuild.cli.options.shared import GENERAL


def _apply(context: typer.Context, config: EngineConfig | None) -> EngineConfig | None:
    """Options from the file, for those that the command line does not set."""
    if config is None:
        return None
    names = [option.name for option in context.command.params]
    option_names = [
        name for name in names if name and not name.startswith("_") and name != "config"
    ]
    command = context.command.name or ""
    require_known(config.written(command), option_names, config.where)
    values = config.of_command(command)
    repeatable = {o.name for o in context.command.params if getattr(o, "multiple", False)}
    context.default_map = {
        name: [value] if name in repeatable and isinstance(value, str | Path) else value
        for name, value in values.items()
        if name in option_names
    }
    return config


def speculation_in(config: EngineConfig | None) -> SpeculativeConfig:
    """Return the speculation settings of a file; none without a file."""
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
