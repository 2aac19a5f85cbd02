"""Creates the prefix cache that the settings of an engine request."""

from __future__ import annotations

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.prefix import PrefixCache
from specbuild.runtime.cache.state_snapshots import StateSnapshots
from specbuild.runtime.engine_dir.cache_groups import (
    DEFAULT_SNAPSHOT_MEMORY,
    SNAPSHOT_STEP,
    slot_bytes,
)
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.errors import UnsupportedHereError
from specbuild.runtime.executors.executor import DeviceExecutor, Executor, SavesStates
from specbuild.runtime.settings import RuntimeSettings


def prefix_cache_of(
    manifest: Manifest,
    settings: RuntimeSettings,
    executor: Executor | DeviceExecutor,
    kv: KvPools,
) -> PrefixCache | None:
    """Return the prefix cache that the settings request; None for no cache.

    Raises UnsupportedHereError if sequences cannot share pages, if there is no memory for snapshots
    of recurrent states, or if pages of generated tokens cannot be cached because lossy modes make
    them inexact.
    """
    if settings.prefix_caching == "off":
        return None
    snapshots = _snapshots(manifest, settings, executor)
    obstacle = None
    if executor.capabilities.fixed_pages:
        name = executor.capabilities.name
        obstacle = f"on {name}: sequences keep their pages to themselves"
    elif manifest.state_groups and snapshots is None:
        needed = sum(map(slot_bytes, manifest.state_groups))
        obstacle = (
            f"for a {manifest.target.model_type} without snapshots of its recurrent states: set "
            f"state_snapshot_memory to {needed} bytes for each"
        )
    if obstacle is not None:
        if settings.prefix_caching == "auto" and not settings.publish_generated_pages:
            return None
        raise UnsupportedHereError(f"no prefix cache {obstacle}")
    lossy = manifest.specpv is not None or manifest.dsa is not None
    if settings.publish_generated_pages and lossy:
        raise UnsupportedHereError(
            "an engine with lossy modes keeps the pages of prompts only: leave "
            "publish_generated_pages out"
        )
    return PrefixCache(
        manifest.cache_groups,
        kv,
        drafts=manifest.draft is not None,
        publish_generated=settings.publish_generated_pages,
        snapshots=snapshots,
    )


def _snapshots(
    manifest: Manifest, settings: RuntimeSettings, executor: Executor | DeviceExecutor
) -> StateSnapshots | None:
    """The store of snapshots; None without recurrent states or without memory for one of them."""
    memory = settings.state_snapshot_memory
    if memory is None:
        memory = DEFAULT_SNAPSHOT_MEMORY if executor.capabilities.device_step else 0
    paged = manifest.cache_groups[0]
    # Each is after pages of its own that are in the cache.
    most = paged.pages * paged.page_size // SNAPSHOT_STEP
    for group in manifest.state_groups:
        capacity = min(memory // slot_bytes(group), most)
        if capacity and isinstance(executor, SavesStates):
            return StateSnapshots(
                group,
                executor.state_copies(group, manifest.limits, capacity=capacity),
                capacity=capacity,
                interval=settings.state_snapshot_interval,
                page_size=paged.page_size,
            )
    return None
