"""KvBlockSelect on a GPU: scores of all blocks, then a radix selection per KV head."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Workspace,
)
from specbuild.runtime.errors import SpecbuildError

SCORE_THREADS = 128
SELECT_THREADS = 512
# Queries of all heads of a group in shared memory: a multiple of the heads.
QUERIES = 64
CTAS_OF_AN_SM = 16
MAX_GROUP = 16
MAX_WIDTH = 128

_SCORE_ARGUMENTS = (
    "q",
    "summary_pool",
    "logical_pages",
    "row_start",
    "row_slot",
    "tree_start",
    "tree_count",
    "blocks",
    "budget",
    "workspace_scores",
)
_SELECT_ARGUMENTS = ("logical_pages", "blocks", "budget", "partial_table", "workspace_scores")


def lower(request: LoweringRequest) -> Lowering:
    """Return two launches; SpecbuildError for heads that the kernels do not support."""
    tensors = request.tensors
    _, q_heads, width = tensors["q"].shape
    _, kv_heads, _, _ = tensors["summary_pool"].shape
    batch, table = tensors["logical_pages"].shape
    entries = tensors["partial_table"].shape[2]
    group = q_heads // kv_heads
    if (
        tensors["q"].dtype != "bfloat16"
        or width > MAX_WIDTH
        or width % (16 if width > 64 else 8)
        or group > MAX_GROUP
    ):
        raise SpecbuildError(
            f"KvBlockSelect: got {group} query heads per KV head, of {width} {tensors['q'].dtype} "
            f"values, expected up to {MAX_GROUP} of up to {MAX_WIDTH} bfloat16 values in "
            "multiples of 8; build for the cpu backend"
        )
    query_tile = QUERIES // (8 if group <= 8 else 16)
    sink_pages = int(request.attributes["sink_pages"])
    block_pages = int(request.attributes["block_pages"])
    max_blocks = max(1, (table - sink_pages) // block_pages)
    sizes = (table, sink_pages, block_pages, max_blocks)
    scoring = (
        ("KV_HEADS", kv_heads),
        ("GROUP", group),
        ("WIDTH", width),
        ("QUERY_TILE", query_tile),
        ("OVER_QUERIES", {"mean": 0, "max": 1, "last": 2}[str(request.attributes["reduction"])]),
        ("QUEST", int(request.attributes["score"] == "quest")),
        ("THREADS", SCORE_THREADS),
        ("SHARED_BYTES", 4 * query_tile * group * width),
    )
    tiles = -(-max_blocks * (1 + (width > 64)) // SCORE_THREADS)
    # Usually one sequence selects: its CTAs should fill the GPU, and those of others return.
    ctas = max(1, CTAS_OF_AN_SM * request.target.multiprocessors // (kv_heads * batch))
    scores = OpLaunch(
        Kernel("kv_block_select", "score_blocks", scoring, "score.cu"),
        grid=(min(tiles, ctas), kv_heads, batch),
        block=SCORE_THREADS,
        shared_bytes=int(dict(scoring)["SHARED_BYTES"]),
        arguments=(*_SCORE_ARGUMENTS, *sizes),
    )
    select = OpLaunch(
        Kernel("kv_block_select", "select_blocks", (("THREADS", SELECT_THREADS),)),
        grid=(kv_heads, batch, 1),
        block=SELECT_THREADS,
        shared_bytes=4 * -(-entries // block_pages),
        arguments=(*_SELECT_ARGUMENTS, *sizes, entries),
    )
    workspace = Workspace("workspace_scores", 4 * batch * kv_heads * max_blocks)
    return Lowering((scores, select), (workspace,))
