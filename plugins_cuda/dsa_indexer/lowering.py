"""DsaIndexer on a GPU: scores of all cached keys, then the best of each row and view."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Unsupported,
    Workspace,
    require,
)
from specbuild.runtime.engine_dir.plan import ITEM_BYTES

SCORE_THREADS, SCORE_CTAS_OF_AN_SM = 256, 2
KEYS_OF_A_CTA = 16 * SCORE_THREADS // 32
# Digits of scores (digits.cuh).
DIGITS = 2048
SELECT_THREADS = 512
MAX_WIDTH = 256
MAX_HEADS = 64
# Rows whose queries fit in shared memory at once.
MAX_ROWS, QUERY_BYTES = 8, 48 * 1024
# The maximum number of listed slots of one digit, and the share of all slots above which reading
# all scores again is faster than a list.
MAX_LISTED, LISTED_SHARE = 8192, 8

_SCORE_ARGUMENTS = (
    "q",
    "head_weights",
    "key_pool",
    "page_table",
    "row_start",
    "row_slot",
    "tree_start",
    "ancestor_bits",
    "positions",
    "budget",
    "workspace_scores",
    "workspace_counts",
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
    "workspace_counts",
    "workspace_marks",
    "workspace_arrivals",
)


def lower(request: LoweringRequest) -> Lowering:
    """Return two launches; SpecbuildError for requests that the kernels do not support.

    A row's list does not depend on other rows of the launch. Prompt chunks have no kernels, because
    the scores of their many rows would not fit in memory.
    """
    tensors = request.tensors
    rows, _, _ = tensors["q"].shape
    _, views, table = tensors["page_table"].shape
    require(refusal(request))
    capacity = table * tensors["key_pool"].shape[2]
    lists = rows * views
    workspaces = (
        Workspace("workspace_scores", 4 * lists * (-(-capacity // 4) * 4)),
        Workspace("workspace_counts", 4 * lists * DIGITS, zeroed=True),
        Workspace("workspace_marks", 8 * lists * _mark_words(capacity)),
        Workspace("workspace_arrivals", 4 * lists, zeroed=True),
    )
    return Lowering((_scoring(request), _selecting(request, capacity)), workspaces)


def _mark_words(capacity: int) -> int:
    """Return the words of a mask with one bit per slot, an even number for vector loads."""
    return 2 * -(-capacity // 64)


def _select_bytes(request: LoweringRequest) -> int:
    """Return the dynamic shared memory of the selection."""
    return request.target.shared_bytes_per_block - 16 * 1024


def refusal(request: LoweringRequest) -> Unsupported | None:
    """Return the reason why no kernel supports the request."""
    tensors = request.tensors
    _, heads, width = tensors["q"].shape
    if request.phase == "prefill":
        return Unsupported(
            "DsaIndexer: no kernel takes the chunks of a prompt: build for the cpu backend."
        )
    if tensors["q"].dtype != "bfloat16" or width % 8 or width > MAX_WIDTH or heads > MAX_HEADS:
        return Unsupported(
            f"DsaIndexer: {heads} heads of {width} {tensors['q'].dtype} values; its kernels take "
            f"up to {MAX_HEADS} of up to {MAX_WIDTH} bfloat16 values, in multiples of 8: build "
            "for the cpu backend."
        )
    capacity = tensors["page_table"].shape[2] * tensors["key_pool"].shape[2]
    select_bytes = _select_bytes(request)
    if 8 * _mark_words(capacity) > select_bytes:
        return Unsupported(
            f"DsaIndexer: {capacity} slots a sequence; a CTA marks up to {4 * select_bytes}: build "
            "with a smaller --max-seq-len."
        )
    return None


def _scoring(request: LoweringRequest) -> OpLaunch:
    tensors = request.tensors
    rows, heads, width = tensors["q"].shape
    batch, views, table = tensors["page_table"].shape
    page_size = tensors["key_pool"].shape[2]
    row_bytes = 2 * (-(-heads // 8) * 8) * (-(-width // 32) * 32 + 32)
    max_rows = max(1, min(MAX_ROWS, QUERY_BYTES // row_bytes))
    of_a_sequence = -(-rows // batch)
    rows_at_once = min(1 << (of_a_sequence - 1).bit_length(), 1 << (max_rows.bit_length() - 1))
    shared_bytes = rows_at_once * (4 * DIGITS + row_bytes)
    constants = (
        ("HEADS", heads),
        ("WIDTH", width),
        ("PAGE_SIZE", page_size),
        ("KEY_BYTES", ITEM_BYTES[tensors["key_pool"].dtype]),
        ("WORDS", tensors["ancestor_bits"].shape[1]),
        ("ROWS", rows_at_once),
        ("THREADS", SCORE_THREADS),
        ("SHARED_BYTES", shared_bytes),
    )
    tiles = -(-table * page_size // KEYS_OF_A_CTA)
    ctas = max(1, SCORE_CTAS_OF_AN_SM * request.target.multiprocessors // (views * batch))
    return OpLaunch(
        Kernel("dsa_indexer", "score_slots", constants),
        grid=(min(tiles, ctas), views, batch),
        block=SCORE_THREADS,
        shared_bytes=shared_bytes,
        arguments=(*_SCORE_ARGUMENTS, table, *_kept(request)),
    )


def _selecting(request: LoweringRequest, capacity: int) -> OpLaunch:
    tensors = request.tensors
    rows, views, held = tensors["selected"].shape
    batch, words = tensors["page_table"].shape[0], tensors["ancestor_bits"].shape[1]
    # A CTA processes four slots per thread.
    threads = SELECT_THREADS if capacity > 4 * SELECT_THREADS else SELECT_THREADS // 2
    marks = _mark_words(capacity)
    listed = min(MAX_LISTED, capacity // LISTED_SHARE, _select_bytes(request) // 4 - 2 * marks)
    constants = (("WORDS", words), ("THREADS", threads))
    return OpLaunch(
        Kernel("dsa_indexer", "select_slots", constants, "select.cu"),
        grid=(-(-capacity // (4 * threads)), rows, views),
        block=threads,
        shared_bytes=4 * (2 * marks + listed),
        arguments=(*_SELECT_ARGUMENTS, batch, capacity, marks, held, listed, *_kept(request)),
    )


def _kept(request: LoweringRequest) -> tuple[int, int, int]:
    names = ("threshold", "first_tokens", "recent_tokens")
    threshold, first, recent = (int(request.attributes[name]) for name in names)
    return threshold, first, recent
