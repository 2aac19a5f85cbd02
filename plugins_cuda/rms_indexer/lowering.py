"""RmsIndexer on a GPU: the norm is a prologue or a launch, the cache write an epilogue."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, Tactic
from specbuild.plugins_cuda.linear.many_tokens import dense_tactics
from specbuild.plugins_cuda.linear.packing import TILE_ROWS
from specbuild.plugins_cuda.linear.projection import lower_projection, projection_of
from specbuild.plugins_cuda.rms_indexer.prefill import lower_prefill, prefill_tactics
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.errors import SpecbuildError


def lower(request: LoweringRequest) -> Lowering:
    """Return the launches; SpecbuildError for over 256 decode rows, or incomplete tiles of keys."""
    require_tiles(request)
    if request.phase == "prefill":
        return lower_prefill(request)
    pool = request.tensors["key_pool"]
    return lower_projection(
        request,
        projection_of("RmsIndexer", request),
        folder="rms_indexer",
        constants=(
            ("HEADS", int(request.attributes["heads"])),
            ("WIDTH", pool.shape[3]),
            ("KEY_BYTES", ITEM_BYTES[pool.dtype]),
        ),
        arguments=("weight", "write_slot", "key_pool", "q", "head_weights"),
    )


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Return loads in flight and their place, rows per unit, and whether CTAs also split K."""
    if request.phase == "prefill":
        return prefill_tactics(request)
    return dense_tactics(request, projection_of("RmsIndexer", request))


def require_tiles(request: LoweringRequest) -> None:
    """Raise SpecbuildError if a tile would have rows of keys and other rows."""
    width = request.tensors["key_pool"].shape[3]
    if width % TILE_ROWS:
        raise SpecbuildError(
            f"RmsIndexer: got keys of {width} values, expected a multiple of {TILE_ROWS}; build "
            "for the cpu backend"
        )
