"""DsaIndexer on a GPU: scores of all cached keys, then a radix selection per row and view."""

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
KEYS_OF_A_CTA = 64
MOST_WIDTH = 256
MOST_HEADS = 64
# Rows whose queries a CTA holds at once.
MOST_ROWS, QUERY_BYTES = 8, 48 * 1024

_SCORE_ARGUMENTS = (
    "q",
    "head_weights",
    "key_pool",
    "page_table",
    "row_start",
    "tree_start",
    "positions",
    "budget",
    "workspace_scores",
)
_SELECT_ARGUMENTS = (
    "row_start",
    "row_slot",
    "tree_start",
    "ancestor_bits",
    "positions",
    "budget",
    "selected",
    "workspace_scores",
)


def lower(request: LoweringRequest) -> Lowering:
    """Two launches; SpecbuildError for what no kernel here does.

    A row's list does not depend on what shares the launch. The scores of a prompt's many rows
    would not fit: its chunks have no kernels.
    """
    tensors = request.tensors
    rows, heads, width = tensors["q"].shape
    batch, views, table = tensors["page_table"].shape
    page_size, held = tensors["key_pool"].shape[2], tensors["selected"].shape[2]
    if request.phase == "prefill":
        raise SpecbuildError(
            "DsaIndexer: no kernel takes the chunks of a prompt: build for the cpu target."
        )
    if tensors["q"].dtype != "bfloat16" or width % 8 or width > MOST_WIDTH or heads > MOST_HEADS:
        raise SpecbuildError(
            f"DsaIndexer: {heads} heads of {width} {tensors['q'].dtype} values; its kernels take "
            f"up to {MOST_HEADS} of up to {MOST_WIDTH} bfloat16 values, in multiples of 8: build "
            "for the cpu target."
        )
    capacity = table * page_size
    marks = 8 * -(-capacity // 32)
    if marks > request.target.shared_bytes_per_block - 16 * 1024:
        raise SpecbuildError(
            f"DsaIndexer: {capacity} slots a sequence, a CTA marks up to "
            f"{4 * (request.target.shared_bytes_per_block - 16 * 1024)}: ask for a smaller "
            "--max-seq-len."
        )
    padded_heads, stride = -(-heads // 8) * 8, -(-width // 32) * 32 + 32
    row_bytes = 2 * padded_heads * stride
    rows_at_once = max(1, min(MOST_ROWS, QUERY_BYTES // row_bytes))
    scoring = (
        ("HEADS", heads),
        ("WIDTH", width),
        ("PAGE_SIZE", page_size),
        ("ROWS", rows_at_once),
        ("THREADS", SCORE_THREADS),
    )
    tiles = -(-capacity // KEYS_OF_A_CTA)
    ctas = max(1, 8 * request.target.multiprocessors // (views * batch))
    threshold, first, recent = (
        int(request.attributes[name]) for name in ("threshold", "first_tokens", "recent_tokens")
    )
    scores = OpLaunch(
        Kernel("dsa_indexer", "score_slots", scoring),
        grid=(min(tiles, ctas), views, batch),
        block=SCORE_THREADS,
        shared_bytes=rows_at_once * row_bytes,
        arguments=(*_SCORE_ARGUMENTS, table, threshold),
    )
    words = tensors["ancestor_bits"].shape[1]
    select = OpLaunch(
        Kernel("dsa_indexer", "select_slots", (("WORDS", words), ("THREADS", SELECT_THREADS))),
        grid=(rows, views, 1),
        block=SELECT_THREADS,
        shared_bytes=marks,
        arguments=(*_SELECT_ARGUMENTS, batch, capacity, held, threshold, first, recent),
    )
    workspace = Workspace("workspace_scores", 4 * rows * views * capacity)
    return Lowering((scores, select), (workspace,))
