"""DSA in words: what an engine does to its output, and what a run did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specbuild.runtime.engine_dir.manifest import Manifest
    from specbuild.runtime.records import DsaStats


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
    """How many steps were sparse, how often checks agreed, and what was set right."""
    stats = [entry for entry in given if entry is not None]
    if not stats:
        return "–"
    sparse, checked, fallback, tokens, agreed, broken, launches = (
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
    text = f"{sparse} sparse, {checked} checked steps"
    if tokens:
        text += f", {100 * agreed / tokens:.1f} % of {tokens} tokens agree"
    if fallback:
        text += f", {fallback} steps fell back to everything"
    if broken:
        text += f", {broken} lists in {launches} launches broke an invariant"
    return text
