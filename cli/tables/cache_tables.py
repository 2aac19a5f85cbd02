"""What the KV caches of an engine hold, drawn for people."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from specbuild.builder.engine.cache_capacity import CacheCapacity
from specbuild.runtime.engine_dir.manifest import Manifest


def cache_tables(manifest: Manifest, capacity: CacheCapacity) -> Group:
    """Pages and tokens of each group, and how many sequences run together."""
    pages = Table(title="KV caches", title_justify="left")
    pages.add_column("group")
    for column in ("pages", "tokens a page", "tokens"):
        pages.add_column(column, justify="right")
    pages.add_column("keeps")
    for group in manifest.cache_groups:
        held = capacity.groups[group.name]
        keeps = f"a window of {group.window}" if group.window else "every token"
        numbers = (held.pages, group.page_size, held.tokens)
        pages.add_row(group.name, *map(str, numbers), keeps)
    together = Table(title="sequences together", title_justify="left")
    for column in ("of up to so many tokens", "guaranteed-no-evict", "max-utilization"):
        together.add_column(column, justify="right")
    for entry in capacity.sequences:
        numbers = (entry.tokens, entry.guaranteed_no_evict, entry.max_utilization)
        together.add_row(*map(str, numbers))
    return Group(pages, together)
