"""What the KV caches of an engine hold and take, drawn for people."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from specbuild.builder.engine.cache_capacity import CacheCapacity
from specbuild.cli.tables.predicted_memory import PredictedMemory
from specbuild.cli.terminal.console import size_text
from specbuild.runtime.engine_dir.manifest import CacheGroup, Manifest


def cache_tables(manifest: Manifest, memory: PredictedMemory, capacity: CacheCapacity) -> Group:
    """Geometry, pages and bytes of each group, and how many sequences run together."""
    together = Table(title="sequences together", title_justify="left")
    for column in ("of up to so many tokens", "guaranteed-no-evict", "max-utilization"):
        together.add_column(column, justify="right")
    for entry in capacity.sequences:
        numbers = (entry.tokens, entry.guaranteed_no_evict, entry.max_utilization)
        together.add_row(*map(str, numbers))
    return Group(_pages_table(manifest, memory), together)


def footprint(manifest: Manifest, memory: PredictedMemory) -> Group:
    """What an engine is about to take: caches by group, and the whole beside its weights."""
    caches = sum(memory.kv_bytes.values())
    drafts = ", ".join(model.geometry.architecture for model in manifest.models)
    draft = f"draft: {drafts}" if drafts else "no draft"
    return Group(
        _pages_table(manifest, memory),
        f"{draft}; weights {size_text(memory.weights_bytes)}, caches {size_text(caches)}, together "
        f"{size_text(memory.weights_bytes + caches)}",
    )


def _pages_table(manifest: Manifest, memory: PredictedMemory) -> Table:
    table = Table(title="KV caches", title_justify="left")
    table.add_column("group")
    numbers = ("layers", "heads × width", "pages", "tokens a page", "bytes a page", "tokens", "all")
    for column in numbers:
        table.add_column(column, justify="right")
    table.add_column("dtype")
    table.add_column("keeps")
    for group in manifest.cache_groups:
        held, taken = group.pages - 1, memory.kv_bytes[group.name]
        table.add_row(
            group.name,
            str(len(group.layers)),
            f"{group.kv_heads} × {_widths(group)}",
            str(held),
            str(group.page_size),
            str(memory.page_bytes[group.name]),
            str(held * group.page_size),
            size_text(taken),
            group.dtype + " (lossy)" * (group.name in manifest.lossy_groups),
            f"a window of {group.window}" if group.window else "every token",
        )
    return table


def _widths(group: CacheGroup) -> str:
    """Values of a head: keys and values apart where they differ, latents from least to most."""
    if group.latent_widths:
        least, most = min(group.latent_widths), max(group.latent_widths)
        return str(least) if least == most else f"{least} to {most}"
    alike = group.k_width == group.v_width
    return str(group.k_width) if alike else f"{group.k_width}+{group.v_width}"
