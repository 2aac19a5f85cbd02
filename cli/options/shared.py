"""Options and arguments that several commands share, each spelled and explained once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer


@dataclass
class Invocation:
    """What the options of one command line say about the command line itself."""

    debug: bool = False


def _remember_debug(context: typer.Context, value: bool) -> bool:
    invocation = context.find_root().obj
    if isinstance(invocation, Invocation):
        invocation.debug = value
    return value


EngineDirectory = Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine directory.")]
Model = Annotated[
    Path, typer.Option("--model", metavar="DIR", help="Checkpoint directory of the target.")
]
Draft = Annotated[
    Path | None,
    typer.Option("--draft", metavar="DIR", help="Checkpoint directory of the EAGLE3 draft."),
]
DraftTopK = Annotated[
    int | None,
    typer.Option(
        "--draft-top-k", metavar="K", min=1, help="Children of each draft node; 1 is a chain."
    ),
]
DraftDepth = Annotated[
    int | None,
    typer.Option(
        "--draft-depth",
        metavar="D",
        min=1,
        help="Levels below the root: the longest draft that can be accepted.",
    ),
]
DraftTokens = Annotated[
    int | None,
    typer.Option("--draft-tokens", metavar="N", min=1, help="Draft nodes kept and verified."),
]
DraftDtype = Annotated[
    Literal["bf16", "fp8", "mxfp4"] | None,
    typer.Option(
        "--draft-dtype",
        help="How a CUDA engine stores the draft's weights; the output stays the same.",
    ),
]
Tactics = Annotated[
    Path | None,
    typer.Option(
        "--tactics",
        metavar="FILE",
        help="Kernel variants as tune measured them, in place of the shipped file.",
    ),
]
TunedOnly = Annotated[
    bool,
    typer.Option("--tuned-only", help="Refuse a shape for which no kernel variant was measured."),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", min=1, help="Threads that compute on the CPU."),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else.")]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug", callback=_remember_debug, is_eager=True, help="Show a traceback on errors."
    ),
]
