"""Engines that several GPUs run together: their weights files, and the heads of one rank.

Every rank reads the tensors of ``weights.safetensors``. Of a sharded tensor each rank has a
different part, with one name and shape, in its own file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.drafters.registry import DRAFT_GROUPS
from specbuild.runtime.engine_dir.manifest import (
    WEIGHTS_FILE,
    CacheGroup,
    Manifest,
    StoredTensor,
)
from specbuild.runtime.engine_dir.plan import RANKS
from specbuild.runtime.errors import EngineFileError

# Engines with more ranks than this have not been measured on GPUs.
MAX_MEASURED = 2


def unmeasured(manifest: Manifest) -> str | None:
    """Return a warning for engines of more GPUs than have been measured, else None."""
    if manifest.ranks <= MAX_MEASURED:
        return None
    return (
        f"engines of {manifest.ranks} GPUs were tested with simulated GPUs only, and not measured; "
        "--experimental runs them (RuntimeSettings(experimental=True))"
    )


def rank_weights_file(rank: int) -> str:
    """Return the file of a rank's parts of the sharded tensors."""
    return f"weights.{rank}.safetensors"


def weights_files(manifest: Manifest) -> tuple[str, ...]:
    """Return the files of the engine's tensors; none if it has no tensors."""
    if not manifest.tensors:
        return ()
    sharded = any(tensor.sharded for tensor in manifest.tensors.values())
    return (WEIGHTS_FILE, *(map(rank_weights_file, range(manifest.ranks)) if sharded else ()))


def tensors_in(manifest: Manifest, file: str) -> dict[str, StoredTensor]:
    """Return the tensors of a weights file, by name."""
    sharded = file != WEIGHTS_FILE
    return {name: t for name, t in manifest.tensors.items() if t.sharded == sharded}


def heads_of_rank(heads: int, ranks: int) -> int:
    """Return the number of KV heads of a rank: its share, or one that several ranks store."""
    return max(1, heads // ranks)


def groups_of_rank(groups: Sequence[CacheGroup], ranks: int) -> tuple[CacheGroup, ...]:
    """Return the cache groups with the heads of one rank; drafts are complete on every rank."""
    if ranks == 1:
        return tuple(groups)
    return tuple(
        group
        if group.name in DRAFT_GROUPS
        else replace(group, kv_heads=heads_of_rank(group.kv_heads, ranks))
        for group in groups
    )


def check_ranks(manifest: Manifest) -> None:
    """Raise EngineFileError if ranks, backend and weights files are inconsistent."""
    if manifest.ranks not in RANKS:
        raise EngineFileError(f"ranks is {manifest.ranks}, must be one of {RANKS}")
    if manifest.ranks > 1 and not facts_of(manifest.backend).has_plan:
        raise EngineFileError(f"a {manifest.backend} engine has {manifest.ranks} ranks, must be 1")
    if manifest.ranks == 1 and any(tensor.sharded for tensor in manifest.tensors.values()):
        raise EngineFileError("tensors are sharded, but ranks is 1")
    for file in weights_files(manifest):
        if file not in manifest.files:
            raise EngineFileError(f"{file} is not listed")
