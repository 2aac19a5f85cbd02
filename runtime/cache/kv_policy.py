"""Who may run when cache pages are fewer than all sequences could need."""

from __future__ import annotations

from typing import Literal, TypeAlias

from specbuild.runtime.engine_dir.cache_groups import sequences_together
from specbuild.runtime.engine_dir.manifest import Manifest

KvPolicy: TypeAlias = Literal["guaranteed-no-evict", "max-utilization"]
# Who has begun goes on to its end: no request waits in the middle or is decoded twice.
DEFAULT_KV_POLICY: KvPolicy = "guaranteed-no-evict"


def allocates_on_demand(manifest: Manifest, policy: KvPolicy) -> bool:
    """Whether sequences get pages as they grow.

    Not where pages hold the worst case, and nothing can run out. Nor where a lossy mode makes
    tokens depend on where steps begin: then what is decoded again would not come out again.
    """
    limits, groups = manifest.limits, manifest.cache_groups
    always_fits = sequences_together(groups, limits, limits.max_seq_len) == limits.max_batch_size
    lossy = manifest.specpv is not None or manifest.dsa is not None
    return policy == "max-utilization" and not (always_fits or lossy)
