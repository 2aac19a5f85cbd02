"""Options and arguments that several commands share, each spelled and explained once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from specbuild.cli.model.reference import nearest_path
from specbuild.cli.terminal.log import show_log
from specbuild.runtime.errors import EngineFileError
from specbuild.runtime.settings import KvPolicy

# The panel of help for options that every command has.
GENERAL = "General"


@dataclass
class Invocation:
    """Options of one command line that are checked against each other."""

    debug: bool = False


def _remember_debug(context: typer.Context, value: bool) -> bool:
    invocation = context.find_root().obj
    if isinstance(invocation, Invocation):
        invocation.debug = value
    show_log(value)
    return value


def suggest_neighbour(path: Path | None) -> Path | None:
    """Return the path; EngineFileError names the most similar entry of its folder if missing."""
    if path is None or path.exists():
        return path
    near = nearest_path(path)
    if near is None:
        return path  # The command reports the missing argument.
    raise EngineFileError(f"{path} does not exist; did you mean {near}?")


EngineDirectory = Annotated[
    Path,
    typer.Argument(metavar="ENGINE", help="Engine directory.", callback=suggest_neighbour),
]
PromptText = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The prompt.", show_default=False)
]
Model = Annotated[
    Path, typer.Option("--model", metavar="DIR", help="Checkpoint directory of the target.")
]
Draft = Annotated[
    Path | None,
    typer.Option(
        "--draft",
        metavar="DIR",
        help="Checkpoint directory of the draft, or mtp for the model's own MTP layer.",
    ),
]
DrafterName = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="NAME",
        help="Drafter to use: one of the engine's (inspect lists them), auto for the "
        "fastest, or none.",
        show_default="auto",
        rich_help_panel="Draft",
    ),
]
DraftTree = Annotated[
    Path | None,
    typer.Option(
        "--draft-tree",
        metavar="FILE.json",
        help="JSON list with the parent of each node of a fixed draft tree; -1 is the root.",
        rich_help_panel="Draft",
    ),
]
NoSpec = Annotated[
    bool,
    typer.Option(
        "--no-spec",
        help="Decode without a draft, as --drafter none; lossy modes stay on.",
        rich_help_panel="Draft",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Decode without a draft and without lossy modes.",
        rich_help_panel="Draft",
    ),
]
RowsPerTurn = Annotated[
    int | None,
    typer.Option(
        "--prefill-rows-per-turn",
        metavar="N",
        min=1,
        help="Maximum number of prompt tokens between two decoding steps.",
        rich_help_panel=GENERAL,
    ),
]
RunsOn = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Device to run on, for example cuda:1; cuda:0,1 for an engine of two GPUs.",
        show_default="the first",
        rich_help_panel=GENERAL,
    ),
]
Experimental = Annotated[
    bool,
    typer.Option(
        "--experimental",
        help="Also run engines of more than 2 GPUs, which have not been measured.",
        rich_help_panel=GENERAL,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        help="Number of CPU threads.",
        show_default="physical cores, up to 8; 1 for small models",
        rich_help_panel=GENERAL,
    ),
]
VerifyKey = Annotated[
    Path | None,
    typer.Option(
        "--verify-key",
        metavar="FILE",
        help="Ed25519 public key (PEM) that must have signed the engine.",
        rich_help_panel="Origin",
    ),
]
Pin = Annotated[
    str | None,
    typer.Option(
        "--pin",
        metavar="DIGEST",
        help="Required SHA-256 of the engine's manifest, as printed by check.",
        rich_help_panel="Origin",
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write the allocation of cache pages as JSON lines.",
        rich_help_panel=GENERAL,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print JSON on standard output, and nothing else.", rich_help_panel=GENERAL
    ),
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        callback=_remember_debug,
        is_eager=True,
        help="Show a traceback on errors, and a log.",
        rich_help_panel=GENERAL,
    ),
]
GenerationConfigName = Annotated[
    Literal["auto", "none"],
    typer.Option(
        "--generation-config",
        metavar="NAME",
        help="Default sampling parameters: those that the model recommends (auto), or none.",
        rich_help_panel="Sampling",
    ),
]
KvPages = Annotated[
    KvPolicy,
    typer.Option(
        "--kv-policy",
        metavar="NAME",
        help="Reserve all cache pages at the start of a request "
        "(guaranteed-no-evict), or allocate them on demand (max-utilization).",
        rich_help_panel=GENERAL,
    ),
]
