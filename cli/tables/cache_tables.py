"""Tables of an engine's KV caches."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from specbuild.builder.engine.cache_capacity import CacheCapacity
from specbuild.cli.tables.predicted_memory import PredictedMemory
from specbuild.cli.terminal.console import size_text
from specbuild.runtime.engine_dir.manifest import CacheGroup, Manifest


def cache_tables(manifest: Manifest, memory: PredictedMemory, capacity: CacheCapacity) -> Group:
    """Return geometry, pages and bytes of each group, and the maximum concurrent sequences."""
    concurrent = Table(title="max concurrent sequences", title_justify="left")
    for column in ("tokens per sequence", "guaranteed-no-evict", "max-utilization"):
        concurrent.add_column(column, justify="right")
    for entry in capacity.sequences:
        numbers = (entry.tokens, entry.guaranteed_no_evict, entry.max_utilization)
        concurrent.add_row(*map(str, numbers))
    return Group(_pages_table(manifest, memory), concurrent)


def footprint(manifest: Manifest, memory: PredictedMemory) -> Group:
    """Return the memory that an engine allocates: caches by group, weights, and the total."""
    caches = sum(memory.kv_bytes.values())
    drafts = ", ".join(model.geometry.architecture for model in manifest.models)
    draft = f"draft: {drafts}" if drafts else "no draft"
    return Group(
        _pages_table(manifest, memory),
        f"{draft}; weights {size_text(memory.weights_bytes)}, caches {size_text(caches)}, total "
        f"{size_text(memory.weights_bytes + caches)}",
    )


def _pages_table(manifest: Manifest, memory: PredictedMemory) -> Table:
    table = Table(title="KV caches", title_justify="left")
    table.add_column("group")
    numbers = ("layers", "heads × width", "pages", "tokens/page", "bytes/page", "tokens", "total")
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
            f"a window of {group.window}" if group.window else "all tokens",
        )
    return table


def _widths(group: CacheGroup) -> str:
    """Return the width of a head: of keys and values if they differ, or the range of latents."""
    if group.latent_widths:
        least, most = min(group.latent_widths), max(group.latent_widths)
        return str(least) if least == most else f"{least} to {most}"
    alike = group.k_width == group.v_width
    return str(group.k_width) if alike else f"{group.k_width}+{group.v_width}"
