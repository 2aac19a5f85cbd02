"""Texts about DSA: the settings of an engine and the statistics of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specbuild.runtime.engine_dir.manifest import Manifest
    from specbuild.runtime.records import DsaStats


def dsa_summary(manifest: Manifest) -> str:
    """Return the effect of DSA on the output, and its sizes."""
    dsa, indexer = manifest.dsa, manifest.target.indexer
    assert dsa is not None and indexer is not None
    checked = f"1 step in {dsa.check_interval} is" if dsa.check_interval else "no step is"
    keys = ", fp8 keys" if dsa.key_dtype == "fp8" else ""
    heads = f"{indexer.heads} indexer heads of {indexer.width}{keys}"
    return (
        f"lossy: {len(indexer.layers)} layers ({heads}) "
        f"attend from position {dsa.threshold} on to the first {dsa.first_tokens}, the last "
        f"{dsa.recent_tokens} and {dsa.top_k} selected tokens; {checked} checked; below "
        f"{100 * dsa.min_agreement:g} % agreement steps attend to all tokens"
    )


def dsa_text(all_stats: Sequence[DsaStats | None]) -> str:
    """Return the numbers of sparse, checked and fallback steps, and the agreement."""
    stats = [entry for entry in all_stats if entry is not None]
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
        text += f", {fallback} steps fell back to all tokens"
    if broken:
        text += f", {broken} invalid lists in {launches} launches"
    return text
