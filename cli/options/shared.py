"""Options and arguments that several commands share, each spelled and explained once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from specbuild.cli.terminal.log import show_log
from specbuild.runtime.cache.kv_policy import KvPolicy

# The panel of help for what every command has.
GENERAL = "General"


@dataclass
class Invocation:
    """What the options of one command line say about the command line itself."""

    debug: bool = False


def _remember_debug(context: typer.Context, value: bool) -> bool:
    invocation = context.find_root().obj
    if isinstance(invocation, Invocation):
        invocation.debug = value
    show_log(value)
    return value


EngineDirectory = Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine directory.")]
Model = Annotated[
    Path, typer.Option("--model", metavar="DIR", help="Checkpoint directory of the target.")
]
Draft = Annotated[
    Path | None,
    typer.Option(
        "--draft",
        metavar="DIR",
        help="Checkpoint directory of the draft; mtp: the model's own MTP layer.",
    ),
]
DrafterName = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="NAME",
        help="What drafts: one of the engine's drafters (inspect lists them), auto for what pays, "
        "or none.",
        show_default="auto",
        rich_help_panel="Draft",
    ),
]
DraftTree = Annotated[
    Path | None,
    typer.Option(
        "--draft-tree",
        metavar="FILE.json",
        help="Draft this tree in every step: the parent of each node, -1 for the root.",
        rich_help_panel="Draft",
    ),
]
NoSpec = Annotated[
    bool,
    typer.Option(
        "--no-spec",
        help="As --drafter none: decode without a draft; lossy modes stay as they are.",
        rich_help_panel="Draft",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Plain decoding's tokens: no draft and no lossy mode.",
        rich_help_panel="Draft",
    ),
]
RowsPerTurn = Annotated[
    int | None,
    typer.Option(
        "--prefill-rows-per-turn",
        metavar="N",
        min=1,
        help="Prompt tokens read at a time while others decode.",
        rich_help_panel=GENERAL,
    ),
]
RunsOn = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="What it was built for, or one GPU of several, as cuda:1.",
        show_default="the first",
        rich_help_panel=GENERAL,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        help="Threads that compute on the CPU.",
        rich_help_panel=GENERAL,
    ),
]
VerifyKey = Annotated[
    Path | None,
    typer.Option(
        "--verify-key",
        metavar="FILE",
        help="Ed25519 public key that must have signed the engine, in PEM.",
        rich_help_panel="Origin",
    ),
]
Pin = Annotated[
    str | None,
    typer.Option(
        "--pin",
        metavar="DIGEST",
        help="SHA-256 that the engine's manifest must have, as check prints it.",
        rich_help_panel="Origin",
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write who gets and gives back which cache page, as JSON lines.",
        rich_help_panel=GENERAL,
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="JSON on standard output, nothing else.", rich_help_panel=GENERAL),
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
        help="Sampling where a request states none: what the model recommends (auto), or not.",
        rich_help_panel="Sampling",
    ),
]
KvPages = Annotated[
    KvPolicy,
    typer.Option(
        "--kv-policy",
        metavar="NAME",
        help="Reserve all cache pages that a prompt may need (guaranteed-no-evict), or give them "
        "on demand (max-utilization).",
        rich_help_panel=GENERAL,
    ),
]
