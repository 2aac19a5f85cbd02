"""RmsIndexer on a GPU: norm as prologue or launch, the key's writing as epilogue."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    ITEM_BYTES,
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
)
from specbuild.plugins_cuda.linear.many_tokens import (
    ARRIVED,
    SUMS,
    TOKENS,
    dense_tactics,
    many_tokens,
    normed_tokens,
)
from specbuild.plugins_cuda.linear.packing import TILE_ROWS
from specbuild.plugins_cuda.linear.storage import weight_tiles
from specbuild.plugins_cuda.linear.streaming import Dense, streaming
from specbuild.plugins_cuda.rms_indexer.prefill import lower_prefill, prefill_tactics
from specbuild.runtime.errors import SpecbuildError


def lower(request: LoweringRequest) -> Lowering:
    """The launches; SpecbuildError for over 256 rows of decoding, or keys of no whole tiles."""
    require_tiles(request)
    if request.phase == "prefill":
        return lower_prefill(request)
    dense = _dense(request)
    many = many_tokens(request, dense)
    cut = many.cut if many else streaming(request, dense)
    eps = float(request.attributes["eps"])
    constants = (
        *cut.constants,
        ("HAS_NORM", int(dense.normed)),
        ("HEADS", int(request.attributes["heads"])),
        ("WIDTH", request.tensors["key_pool"].shape[3]),
        ("KEY_BYTES", ITEM_BYTES[request.tensors["key_pool"].dtype]),
        ("EPS", eps),
    )
    launch = OpLaunch(
        Kernel("rms_indexer", "rms_indexer_of_many" if many else "rms_indexer", constants),
        grid=cut.grid,
        block=cut.block,
        shared_bytes=cut.shared_bytes,
        arguments=(
            *(("x",) if many else ("x", "norm")),
            *("weight", "write_slot", "key_pool", "q", "head_weights"),
            *((TOKENS, SUMS, ARRIVED) if many else ()),
            dense.rows,
        ),
    )
    if not many:
        return Lowering((launch,))
    if not dense.normed:
        return Lowering((launch,), many.workspaces)
    norm = normed_tokens(dense, many.token_tiles, eps=eps, rounding="gpt_oss")
    return Lowering((norm, launch), many.workspaces)


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """Loads in flight and where they wait, rows a unit, and whether CTAs also split K."""
    if request.phase == "prefill":
        return prefill_tactics(request)
    return dense_tactics(request, _dense(request))


def require_tiles(request: LoweringRequest) -> None:
    """SpecbuildError where a tile would hold rows of keys and of something else."""
    width = request.tensors["key_pool"].shape[3]
    if width % TILE_ROWS:
        raise SpecbuildError(
            f"RmsIndexer: keys of {width} values, its kernels take multiples of {TILE_ROWS}: build "
            "for the cpu target."
        )


def _dense(request: LoweringRequest) -> Dense:
    tensors = request.tensors
    rows, width = tensors["x"].shape
    tiles, blocks, storage = weight_tiles(tensors["weight"], width)
    return Dense("RmsIndexer", tiles, blocks, rows, normed="norm" in tensors, storage=storage)
