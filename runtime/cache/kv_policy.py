"""Policies for engines whose cache has fewer pages than all sequences could need."""

from __future__ import annotations

from typing import Literal, TypeAlias

from specbuild.runtime.engine_dir.cache_groups import sequences_together
from specbuild.runtime.engine_dir.manifest import Manifest

KvPolicy: TypeAlias = Literal["guaranteed-no-evict", "max-utilization"]
# A started request runs to its end: it is never paused or preempted.
DEFAULT_KV_POLICY: KvPolicy = "guaranteed-no-evict"


def allocates_on_demand(manifest: Manifest, policy: KvPolicy) -> bool:
    """Return whether sequences get pages as they grow.

    They do not if the pages hold the worst case, so that nothing can run out. They also do not with
    a lossy mode, whose tokens depend on where steps begin: a preempted sequence would not give the
    same tokens again.
    """
    limits, groups = manifest.limits, manifest.cache_groups
    always_fits = sequences_together(groups, limits, limits.max_seq_len) == limits.max_batch_size
    lossy = manifest.specpv is not None or manifest.dsa is not None
    return policy == "max-utilization" and not (always_fits or lossy)
