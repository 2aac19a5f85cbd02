"""Options of DSA: what a build settles, what a run may ask for less of, and what a run did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from specbuild.runtime.engine_dir.manifest import Manifest
    from specbuild.runtime.records import DsaStats

Enable = Annotated[
    bool | None,
    typer.Option(
        "--dsa/--no-dsa",
        help="Attend to the tokens that dsa_indexer.safetensors chooses: lossy. Else as the config "
        "says.",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--dsa-top-k", metavar="N", min=1, help="Tokens that a row chooses (2048)."),
]
Threshold = Annotated[
    int | None,
    typer.Option(
        "--dsa-threshold",
        metavar="N",
        min=0,
        help="Tokens before position N attend to everything (8192).",
    ),
]
FirstTokens = Annotated[
    int | None,
    typer.Option("--dsa-first-tokens", metavar="N", min=0, help="Tokens kept at the start (4)."),
]
RecentTokens = Annotated[
    int | None,
    typer.Option(
        "--dsa-recent-tokens", metavar="N", min=1, help="Tokens kept at the end, itself too (64)."
    ),
]
MinAgreement = Annotated[
    float | None,
    typer.Option(
        "--dsa-min-agreement",
        metavar="P",
        min=0.0,
        max=1.0,
        help="Attend to everything where less of what checks compare agrees (0.75).",
    ),
]
CheckInterval = Annotated[
    int | None,
    typer.Option(
        "--dsa-check-interval",
        metavar="N",
        min=0,
        help="Check every N-th step against attention to everything (64); 0 checks none.",
    ),
]
KeyDtype = Annotated[
    Literal["bf16", "fp8"] | None,
    typer.Option(
        "--dsa-key-dtype",
        help="The cached keys of indexers; fp8 (e4m3) takes half, and chooses nearly the same.",
    ),
]
RequestedTopK = Annotated[
    int | None,
    typer.Option(
        "--dsa-top-k",
        metavar="N",
        min=0,
        help="Tokens that a row chooses, up to the engine's; 0 attends to everything.",
    ),
]


def dsa_summary(manifest: Manifest) -> str:
    """What an engine with DSA does to its output, and its sizes."""
    dsa, indexer = manifest.dsa, manifest.target.indexer
    assert dsa is not None and indexer is not None
    checked = f"1 step in {dsa.check_interval}" if dsa.check_interval else "no step"
    keys = ", fp8 keys" if dsa.key_dtype == "fp8" else ""
    heads = f"{indexer.heads} indexer heads of {indexer.width}{keys}"
    return (
        f"lossy: {len(indexer.layers)} layers ({heads}) "
        f"attend from position {dsa.threshold} on to the first {dsa.first_tokens}, the last "
        f"{dsa.recent_tokens} and {dsa.top_k} chosen tokens; {checked} is checked, to "
        f"everything where less than {100 * dsa.min_agreement:g} % agrees"
    )


def dsa_text(given: Sequence[DsaStats | None]) -> str:
    """How many steps narrowed attention, how often checks agreed, and what was set right."""
    stats = [entry for entry in given if entry is not None]
    if not stats:
        return "–"
    narrowed, checked, fallback, tokens, agreed, broken, launches = (
        sum(getattr(entry, name) for entry in stats)
        for name in (
            "narrowed_steps",
            "checked_steps",
            "fallback_steps",
            "checked_tokens",
            "agreed_tokens",
            "broken_lists",
            "broken_launches",
        )
    )
    text = f"{narrowed} narrowed, {checked} checked steps"
    if tokens:
        text += f", {100 * agreed / tokens:.1f} % of {tokens} tokens agree"
    if fallback:
        text += f", {fallback} steps fell back to everything"
    if broken:
        text += f", {broken} lists in {launches} launches broke an invariant"
    return text
