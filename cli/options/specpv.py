"""Options of SpecPV, by its keys: what a build settles, and what a run may ask for less of."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from specbuild.runtime.errors import SpecbuildError

Enable = Annotated[
    bool,
    typer.Option(
        "--specpv",
        help="Verify long contexts over a partial view of the cache: faster, and lossy.",
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option("--specpv-block-size", metavar="N", min=1, help="Tokens of a block (16)."),
]
SinkBlocks = Annotated[
    int | None,
    typer.Option(
        "--specpv-n-sink-blocks", metavar="N", min=1, help="Blocks kept at the start (2)."
    ),
]
RetrievalBlocks = Annotated[
    int | None,
    typer.Option(
        "--specpv-n-retrieval-blocks", metavar="N", min=1, help="Blocks retrieved at most (256)."
    ),
]
WindowBlocks = Annotated[
    int | None,
    typer.Option(
        "--specpv-n-window-blocks", metavar="N", min=1, help="Blocks kept at the end (8)."
    ),
]
SpecTokensBuf = Annotated[
    int | None,
    typer.Option(
        "--specpv-n-spec-tokens-buf",
        metavar="N",
        min=1,
        help="Tokens of partial steps and a tree, at most (64, more for a large tree).",
    ),
]
PartialThreshold = Annotated[
    int | None,
    typer.Option(
        "--specpv-partial-threshold",
        metavar="N",
        min=0,
        help="Contexts up to N tokens are verified whole (4096).",
    ),
]
FullRefreshInterval = Annotated[
    int | None,
    typer.Option(
        "--specpv-full-refresh-interval",
        metavar="N",
        min=0,
        help="Partial steps between two full ones at most (32); 0 allows none.",
    ),
]
Reduction = Annotated[
    Literal["mean", "max", "last"] | None,
    typer.Option(
        "--specpv-reduction",
        help="A block's score over the tree's queries: mean, max, or the root's (last).",
    ),
]
Score = Annotated[
    Literal["dot", "quest", "indexer"] | None,
    typer.Option(
        "--specpv-score",
        help="By products with extreme keys (dot), Quest's bound, or that of DSA's indexers.",
    ),
]
RequestedBlocks = Annotated[
    str | None,
    typer.Option(
        "--specpv-retrieval-blocks",
        metavar="N|auto",
        help="Blocks that a partial view retrieves, up to the engine's; 0 verifies over all.",
    ),
]


def requested_blocks(text: str | None) -> int | Literal["auto"] | None:
    """What ``--specpv-retrieval-blocks`` says; SpecbuildError where it is neither number nor auto.

    The engine knows which numbers it takes.
    """
    if text is None or text == "auto":
        return None if text is None else "auto"
    if not text.isdecimal():
        raise SpecbuildError(
            f"--specpv-retrieval-blocks is {text!r}, expected a number of blocks or 'auto'"
        )
    return int(text)
