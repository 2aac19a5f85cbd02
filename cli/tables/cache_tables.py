"""Tables of an engine's KV caches."""

from __future__ import annotations

from collections.abc import Callable

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
    states = [_states_table(manifest, memory)] if manifest.state_groups else []
    return Group(_pages_table(manifest, memory), *states, concurrent)


def footprint(manifest: Manifest, memory: PredictedMemory) -> str:
    """Return two lines: the model with its limits, and the memory that the engine allocates."""
    caches = sum(memory.kv_bytes.values()) + sum(memory.state_bytes.values())
    drafts = ", ".join(model.geometry.architecture for model in manifest.models)
    draft = f"draft: {drafts}" if drafts else "no draft"
    limits = manifest.limits
    return (
        f"model: {manifest.target.model_type} for {manifest.backend}, {draft}, "
        f"{limits.max_batch_size} sequences of {limits.max_seq_len} tokens\n"
        f"memory: weights {size_text(memory.weights_bytes)}, KV caches {size_text(caches)}, total "
        f"{size_text(memory.weights_bytes + caches)}"
    )


def _pages_table(manifest: Manifest, memory: PredictedMemory) -> Table:
    """Return a column for each group: there are up to five, and ten properties."""
    groups = manifest.cache_groups
    table = Table(title="KV caches", title_justify="left")
    table.add_column("group", style="bold")
    for group in groups:
        table.add_column(group.name, justify="right", overflow="fold")

    def add(title: str, value: Callable[[CacheGroup], object]) -> None:
        table.add_row(title, *(str(value(group)) for group in groups))

    add("layers", lambda g: len(g.layers))
    add("heads × width", lambda g: f"{g.kv_heads} × {_widths(g)}")
    add("pages", lambda g: g.pages - 1)
    add("tokens/page", lambda g: g.page_size)
    add("bytes/page", lambda g: memory.page_bytes[g.name])
    add("tokens", lambda g: (g.pages - 1) * g.page_size)
    add("total", lambda g: size_text(memory.kv_bytes[g.name]))
    add("dtype", lambda g: g.dtype + " (lossy)" * (g.name in manifest.lossy_groups))
    add("keeps", lambda g: f"a window of {g.window}" if g.window else "all tokens")
    return table


def _states_table(manifest: Manifest, memory: PredictedMemory) -> Table:
    """Return a row for each group of recurrent states."""
    table = Table(title="recurrent states", title_justify="left")
    table.add_column("group", style="bold")
    for column in ("layers", "heads × matrix", "sequences", "bytes/sequence", "total"):
        table.add_column(column, justify="right")
    for group in manifest.state_groups:
        table.add_row(
            group.name,
            str(len(group.layers)),
            f"{group.heads} × {group.key_width}×{group.value_width}",
            str(group.slots - 2),
            str(memory.slot_bytes[group.name]),
            size_text(memory.state_bytes[group.name]),
        )
    return table


def _widths(group: CacheGroup) -> str:
    """Return the width of a head: of keys and values if they differ, or the range of latents."""
    if group.latent_widths:
        narrowest, widest = min(group.latent_widths), max(group.latent_widths)
        return str(narrowest) if narrowest == widest else f"{narrowest} to {widest}"
    is_equal = group.k_width == group.v_width
    return str(group.k_width) if is_equal else f"{group.k_width}+{group.v_width}"
